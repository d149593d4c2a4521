"""Hydra scans this namespace: the plugin itself lives in the package."""

from torchrepro.integrations.hydra import ReproConfigSource as ReproConfigSource
from torchrepro.integrations.hydra import ReproSearchPath as ReproSearchPath
