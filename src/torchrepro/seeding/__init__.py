"""Random numbers of a run: named streams, generators, data loading and snapshots."""
