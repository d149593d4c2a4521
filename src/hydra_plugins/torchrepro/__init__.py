"""Hydra scans this namespace: the plugin itself lives in the package."""

from torchrepro.integrations.hydra import ReproSearchPath as ReproSearchPath
from torchrepro.integrations.hydra_source import ReproConfigSource as ReproConfigSource
