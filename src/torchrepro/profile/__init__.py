"""From the name of a profile to a validated, frozen `Profile`."""
