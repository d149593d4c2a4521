"""Locks, which later runs are checked against, and diffs of profiles, manifests and runs."""
