"""The access behind `device.fallback`, whose policy is imported only where a profile sets it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torchrepro.knobs.knob import Missing
from torchrepro.policies.fallback.value import per_op, waits_for_refusal

_POLICY = "torchrepro.policies.fallback.deciding"
_IDLE = {
    0: "torch's deterministic algorithms are off",
    1: "torch only warns about ops without a deterministic kernel",
}
"""What torch's debug mode means where no op is refused."""


@dataclass(frozen=True, slots=True)
class FallbackPolicy:
    """What an op without a deterministic kernel does; None where nobody has said."""

    def read(self) -> Any:
        policy = sys.modules.get(_POLICY)
        return policy.value_in_force() if policy else None

    def write(self, value: Any) -> None:
        from torchrepro.policies.fallback import deciding as fallback

        asked = value if isinstance(value, str) else {"ops": dict(per_op(value))}
        mode = sys.modules["torch"].get_deterministic_debug_mode()
        if waits_for_refusal(asked) and mode in _IDLE:
            fallback.check(asked)  # a wrong name is wrong in any case
            raise Missing(
                f"{_IDLE[mode]}, so that no op falls back: set "
                "backends.torch.deterministic_algorithms to error"
            )
        fallback.install(asked)

    save = read

    def restore(self, saved: Any) -> None:
        if saved != self.read():
            from torchrepro.policies.fallback import deciding as fallback

            fallback.install(saved)
