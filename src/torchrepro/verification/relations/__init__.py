"""Runs variants of a program, such as one without torch.compile, and compares the results."""
