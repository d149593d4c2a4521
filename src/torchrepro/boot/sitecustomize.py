"""Loaded by every Python that `torchrepro run` starts: hands over, then steps out of the way.

It has to be harmless in any Python of any age, with or without torchrepro, so it uses nothing but
what all of them have, and then runs the sitecustomize that it stands in front of.
"""

import os
import sys


def _step_aside():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]


def _hand_over():
    if not os.environ.get("TORCHREPRO_PROFILE") or sys.version_info < (3, 11):
        return
    try:
        from torchrepro.started import put_in_force_on_import

        if os.environ.get("TORCHREPRO_STRESS"):
            from torchrepro.verify.perturbed import perturb

            perturb(os.environ)
    except ImportError:
        return  # this Python has no torchrepro: it is left alone
    put_in_force_on_import()


def _run_the_next():
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) not in (None, "sitecustomize"):
            raise
    finally:
        if this is not None:  # the import system looks for the module that it is loading
            sys.modules.setdefault("sitecustomize", this)


_step_aside()
_hand_over()
_run_the_next()
