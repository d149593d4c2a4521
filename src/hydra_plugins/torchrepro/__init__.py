"""Hydra scans this namespace package for plugins; the code is in `torchrepro.integrations`."""

from torchrepro.integrations.hydra import ReproSearchPath as ReproSearchPath
from torchrepro.integrations.hydra_source import ReproConfigSource as ReproConfigSource
