"""The outcome of each setting, the report of them, and the state of the process they are set in."""
