"""Doors through which other frameworks reach torchrepro; nothing in the package imports them."""
