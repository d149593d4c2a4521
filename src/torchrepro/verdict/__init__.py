"""Whether two recorded runs were the same, and where they parted if not."""
