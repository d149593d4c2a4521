"""Hooks into training frameworks, which are installed while a profile is active."""
