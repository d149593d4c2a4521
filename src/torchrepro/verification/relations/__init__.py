"""Relations: variants of a program that ought to agree with it, and how they are compared."""
