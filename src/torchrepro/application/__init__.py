"""A profile becomes a plan; the plan is applied, guarded, and undone."""
