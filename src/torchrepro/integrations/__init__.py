"""Plugins that other frameworks load; nothing in the package imports them."""
