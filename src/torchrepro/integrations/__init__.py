"""Plugins for Hydra, pytest and experiment trackers, which load these modules themselves."""
