"""Recordings of a run, op by op: recorded, stored, and read."""
