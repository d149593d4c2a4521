"""Where the entry point of pytest-randomly finds `reseed`."""

from torchrepro.seeding.global_seeds import reseed

__all__ = ["reseed"]
