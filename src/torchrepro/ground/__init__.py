"""Helpers for all other packages; none of them depends on profiles."""
