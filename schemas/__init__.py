"""The vocabulary of the mesh: msgspec Structs, the table of kinds, ids, subjects and errors. Imports nothing of ours."""
