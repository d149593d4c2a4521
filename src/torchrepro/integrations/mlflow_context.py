"""Tags that every MLflow run gets which starts under a profile, with no line of code.

MLflow loads this through the entry-point group `mlflow.run_context_provider` when it is imported
itself, and asks it whenever a run starts; see https://mlflow.org/docs/latest/ml/plugins.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrepro.applier import Applied


class ProfileTags:
    """Names the profile in force to MLflow; `log_to` adds its values and the manifest."""

    def in_context(self) -> bool:
        """Whether a profile is in force."""
        return bool(_in_force())

    def tags(self) -> dict[str, str]:
        """Return the name, the guarantee held and the digest of the innermost profile in force."""
        report = _in_force()[-1].report
        return {
            "torchrepro.name": report.profile,
            "torchrepro.guarantee": report.guarantee.held,
            "torchrepro.digest": report.digest,
        }


def _in_force() -> tuple[Applied, ...]:
    # Without the module nothing was ever put in force, and importing it would cost time.
    applier = sys.modules.get("torchrepro.applier")
    return applier.in_force() if applier else ()
