"""Plans a profile, applies the plan, watches the knobs for drift, and restores the process."""
