"""Holding later runs to what one run was: locks, and what differs between any two descriptions."""
