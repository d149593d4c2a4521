"""Helpers for all other packages, without any dependency on profiles."""
