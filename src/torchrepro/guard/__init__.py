"""The drift guard: whether knobs still hold what the profiles in force have set."""
