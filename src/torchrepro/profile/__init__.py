"""Find, read and validate a profile, from its name to a frozen `Profile`."""
