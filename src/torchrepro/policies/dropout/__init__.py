"""Dropout as the identity."""
