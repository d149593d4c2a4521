"""What becomes of ops without a deterministic kernel."""
