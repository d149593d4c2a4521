"""Checks the results of a command against a lock, and finds the cause of a difference."""
