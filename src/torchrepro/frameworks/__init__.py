"""The frameworks in which people train: what is done within each while a profile is in force."""
