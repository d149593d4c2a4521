"""Policies: changes to ops of the whole process that no flag can make, and their undo."""
