"""Reading a data directory while no server runs: `upr-server check` and `upr-server dump`."""
