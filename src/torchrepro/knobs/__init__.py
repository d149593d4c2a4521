"""The catalogue: one row per piece of process state that a profile can set."""
