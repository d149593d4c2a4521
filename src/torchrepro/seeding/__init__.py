"""Where every random number of a run comes from: streams, generators, loading, snapshots."""
