"""Integrations of training frameworks: our hooks into each of them while a profile is active."""
