"""What a run was: everything that its numbers depend on, recorded without secrets."""
