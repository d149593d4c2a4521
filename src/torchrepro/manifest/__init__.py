"""The record of a run: everything that its results depend on, without secrets."""
