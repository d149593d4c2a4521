"""Applies a profile in the processes of a run, and starts earlier runs again."""
