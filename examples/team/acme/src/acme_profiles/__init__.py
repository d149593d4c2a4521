"""Profiles for torchrepro, as YAML files: `torchrepro list` shows them as acme/..."""
