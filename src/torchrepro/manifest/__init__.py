"""The manifest of a run: a record of all that its results depend on, without secrets."""
