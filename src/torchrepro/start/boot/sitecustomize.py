"""Loaded by every Python that `torchrepro run` starts: applies the profile in this process.

It must be harmless in every Python, of any version, with or without torchrepro. So it uses only
features that all versions have. At the end it runs the sitecustomize that this file shadows.
"""

import atexit
import os
import sys


def _step_aside():
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != folder]


def _hand_over():
    try:  # noqa: SIM105 - old versions have no `suppress`
        os.rmdir(os.environ.pop("TORCHREPRO_UNTAKEN", ""))
    except OSError:
        pass  # not set, or removed by an earlier Python
    asked = os.environ.get("TORCHREPRO_PROFILE") or os.environ.get("TORCHREPRO_RECORD")
    if asked and not _begin():
        atexit.register(_report_if_torch_was_imported)


def _begin():
    if sys.version_info < (3, 11):  # noqa: UP036 - the command may start any Python
        return False
    try:
        from torchrepro.start.bootstrap import apply_on_import, record_on_import

        if os.environ.get("TORCHREPRO_AT_START"):
            from torchrepro.verification.at_start import begin

            begin(os.environ)
    except ImportError:
        return False  # this Python has no torchrepro
    if os.environ.get("TORCHREPRO_PROFILE"):
        apply_on_import()
    else:
        record_on_import()
    return True


def _report_if_torch_was_imported():
    if "torch" in sys.modules and sys.stderr is not None:
        lacks = "under no profile" if os.environ.get("TORCHREPRO_PROFILE") else "not recorded"
        words = "imported torch and is " + lacks + ": no torchrepro can be imported by"
        line = " ".join(["torchrepro: process", str(os.getpid()), words, sys.executable])
        sys.stderr.write(line + "\n")


def _run_the_next():
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) not in (None, "sitecustomize"):
            raise
    finally:
        if this is not None:  # the import system needs the module that it is loading
            sys.modules.setdefault("sitecustomize", this)


try:
    _step_aside()
    _hand_over()
    _run_the_next()
except KeyboardInterrupt:
    # This early, Python would end with a fatal error and status 1, instead of as usual after ^C.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
