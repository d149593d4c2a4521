"""The catalogue has one row for each setting of a process that a profile can change."""
