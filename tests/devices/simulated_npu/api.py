"""The module ``torch.npu``: functions that torch and its users need from the module of a device."""

import torch

from simulated_npu.generators import COUNT, GENERATORS

default_generators = GENERATORS
_initialized = True  # asked by torch.utils.checkpoint, which else keeps no state of the device
_current = [0]


def _index(device: torch.device | str | int | None) -> int:
    """Return the index of `device`; the current index if it has none."""
    if device is None or device == -1:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        return current_device()
    if not 0 <= index < COUNT:
        raise RuntimeError(f"invalid device ordinal npu:{index}: there are {COUNT} devices")
    return index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Do nothing: the devices are initialized from the start."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return COUNT


def current_device() -> int:
    return _current[0]


def set_device(device: torch.device | str | int) -> None:
    _current[0] = _index(device)


def get_device_name(device: torch.device | str | int | None = None) -> str:
    return f"simulated npu {_index(device)}"


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Return at once: every op is finished when it returns."""
    _index(device)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


class device:  # noqa: N801 - the name that torch asks for
    """Within the block "npu" means `device`."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self._inside = _index(device)

    def __enter__(self) -> None:
        self._outside = current_device()
        set_device(self._inside)

    def __exit__(self, *_: object) -> None:
        set_device(self._outside)


def manual_seed(seed: int) -> None:
    GENERATORS[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device; `torch.manual_seed` calls this."""
    for generator in GENERATORS:
        generator.manual_seed(int(seed))


def initial_seed() -> int:
    return GENERATORS[current_device()].initial_seed()


def get_rng_state(device: torch.device | str | int = "npu") -> torch.Tensor:
    return GENERATORS[_index(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in GENERATORS]


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int = "npu") -> None:
    GENERATORS[_index(device)].set_state(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for generator, state in zip(GENERATORS, new_states, strict=True):
        generator.set_state(state)
