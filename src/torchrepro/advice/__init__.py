"""Runs a command again with controlled changes after a divergence, to find the cause and a remedy.

Only `trials.answer` is used from outside. Without this package, verdicts have no trials.
"""
