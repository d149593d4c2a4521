"""Random numbers for devices, drawn on the host."""
