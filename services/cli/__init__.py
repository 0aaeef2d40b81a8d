"""The command line: `gyre`. Heavy libraries are imported inside the commands that need them."""
