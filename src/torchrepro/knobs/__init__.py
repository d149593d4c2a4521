"""The catalogue: one row per setting of a process that a profile can change."""
