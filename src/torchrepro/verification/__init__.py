"""Runs a command several times, and checks whether all runs compute the same results."""
