"""A recorded run under other parameters: `gyre replay run.gyre --with scheduler.rho_min=0.3`."""
