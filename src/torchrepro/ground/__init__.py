"""Functions that every other package is built on; none of them knows of profiles."""
