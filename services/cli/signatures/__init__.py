"""What `gyre` takes, command by command. Each imports what it needs when it runs, so that help answers at once."""
