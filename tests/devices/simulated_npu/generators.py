"""The random numbers of the device: a seed and an offset per device, as in Philox."""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

COUNT = 2
_STATE = struct.Struct("<QQ")
_STEP = 4  # a philox call makes four numbers, so offsets are multiples of it


class Generator:
    """The generator of one device; its state has 16 bytes, as in torch_npu.

    It is not a ``torch.Generator``, which for a private-use device needs C++.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._offset = 0
        self._seed = torch.Generator().initial_seed()  # what torch starts every device with

    @property
    def device(self) -> torch.device:
        return torch.device("npu", self._index)

    def manual_seed(self, seed: int) -> "Generator":
        if not -(2**63) <= seed < 2**64:
            raise ValueError("Overflow when unpacking long long")
        self._seed, self._offset = seed % 2**64, 0
        return self

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._packed()), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> "Generator":
        if state.device.type != "cpu" or state.dtype != torch.uint8 or len(state) != _STATE.size:
            raise RuntimeError(f"RNG state must be a CPU byte tensor of size {_STATE.size}")
        self._seed, self._offset = _STATE.unpack(bytes(state.tolist()))
        return self

    def advance(self, numbers: int) -> None:
        """Count the `numbers` that an op has drawn."""
        self._offset += _STEP * max(1, -(-numbers // _STEP))

    @contextmanager
    def in_place_of_the_hosts(self) -> Iterator[None]:
        """Let ops on the host draw the numbers of this device, not those of the host."""
        # The CPU's generator reads only 32 bits of a seed: hash all of the state into them.
        digest = hashlib.blake2b(self._packed(), digest_size=4).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        hosts = torch.default_generator.get_state()
        torch.default_generator.set_state(stream.get_state())
        try:
            yield
        finally:
            torch.default_generator.set_state(hosts)

    def _packed(self) -> bytes:
        return _STATE.pack(self._seed, self._offset)


GENERATORS = tuple(Generator(index) for index in range(COUNT))
