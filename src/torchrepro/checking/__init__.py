"""Checks a command against a lock, and finds what changed its results."""
