"""Writes locks, checks later runs against locks, and compares profiles, manifests and runs."""
