"""The services of the mesh, one package each, and `services.mesh`, the runtime that all stand on."""
