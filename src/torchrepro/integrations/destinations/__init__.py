"""Where teams look for what a run was: one module per tool, each in that tool's own terms."""
