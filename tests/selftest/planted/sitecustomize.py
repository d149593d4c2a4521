"""Faults for the processes of a self-test, which import this as they start."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path


def dropout_left_on():
    """The policy that zeroes dropout says that it does, and does nothing."""
    from torchrepro.policies import dropout

    object.__setattr__(dropout.policy, "install", lambda undo: None)


def write_that_does_not_hold():
    """A flag takes every value but one, which it does not keep."""
    from torchrepro.knobs.catalogue import knobs_by_name

    access = type(knobs_by_name()["backends.torch.default_dtype"].access)
    write = access.write

    def kept(self, value):
        if (self.setter, value) != ("set_default_dtype", "float64"):
            write(self, value)

    access.write = kept


def undo_that_forgets():
    """Variables of OpenMP stay as the profile has set them."""
    from torchrepro.knobs.knob import Variable

    restore = Variable.restore

    def restored(self, saved):
        if not self.name.startswith("OMP_"):
            restore(self, saved)

    Variable.restore = restored


def undo_that_leaves_another_variable():
    """The undo of a flag sets a variable that is not the flag's."""
    from torchrepro.knobs.catalogue import knobs_by_name

    access = type(knobs_by_name()["backends.torch.fill_uninitialized_memory"].access)
    restore = access.restore

    def restored(self, saved):
        restore(self, saved)
        if self.name == "fill_uninitialized_memory":
            os.environ["LEFT"] = os.environ["API_TOKEN"]

    access.restore = restored


def try_instead(**attempts):
    """Have the promises with these names be tried by other functions."""
    import torchrepro.selftest as module

    module.PROMISES = tuple(
        replace(row, attempt=attempts.get(row.name, row.attempt)) for row in module.PROMISES
    )


def failures_that_linger():
    """A promise fails with a secret in its error, after which all fail in the same process.

    The next one says a secret and ends its process.
    """
    failed = []

    def fails(device):
        failed.append(device)
        raise RuntimeError("no access with " + os.environ["API_TOKEN"])

    def crashes(device):
        assert not failed
        print("no access with", os.environ["API_TOKEN"], flush=True)
        os.abort()

    def holds(device):
        assert not failed

    try_instead(dropout=fails, fallback=crashes, **{"one bit": holds})


def hang():
    """The process waits for minutes while it tries a promise, and leaves a file that says so."""

    def waits(device):
        Path("waits").touch()
        time.sleep(600)

    try_instead(dropout=waits)


if any("torchrepro.selftest" in word for word in sys.orig_argv):
    for name in filter(None, os.environ.get("PLANTED", "").split(",")):
        globals()[name]()
