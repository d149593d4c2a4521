"""Tries on this machine what torchrepro promises, and says what was held."""
