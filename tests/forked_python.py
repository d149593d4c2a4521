"""Stands in for `python PROGRAM`: runs each program in a fork of one process that has torch.

Importing torch is most of what a short run takes. A line on standard input is a run as JSON: the
words after `python`, the environment, the folder, and the files that are its standard input,
output and error. A line on standard output is its exit status. What Python reads of its
environment before it starts (PYTHONHASHSEED, what malloc goes by) is that of this process. A run
that replaces itself by another Python, as `torchrepro run` does, goes on in another fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.machinery
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import hydra  # noqa: F401 - loaded for the programs that are Hydra apps
import numpy.random
import pydantic.type_adapter
import pydantic.types  # noqa: F401 - this and the next two: for those that are commands
import rich.markdown  # noqa: F401
import sklearn.datasets
import sklearn.model_selection  # noqa: F401 - as it is for those that train on its digits
import torch
import torch._dynamo
import typer.rich_utils  # noqa: F401
import xxhash  # noqa: F401 - for those that record

BOOT = "sitecustomize"
FIRST = "TORCHREPRO_FIRST"  # the process that `torchrepro run` starts: it keeps its id
TIMEOUT = 600
WAITED_FOR = ("random", "numpy.random", "torch")
"""What torchrepro acts on the import of: a fork has them, and they are imported once more."""


class Kept:
    """Finds modules that were loaded before, as they are."""

    def __init__(self) -> None:
        self.modules = {name: sys.modules.pop(name) for name in WAITED_FOR}

    def find_spec(self, name, path=None, target=None):
        if name not in self.modules:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=self.modules[name].__file__)
        spec.submodule_search_locations = getattr(self.modules[name], "__path__", None)
        return spec

    def create_module(self, spec):
        return self.modules[spec.name]

    def exec_module(self, module):
        pass


def become(words, environment, folder, streams):
    """Turn this fork into what `python WORDS...` would be once it has started."""
    os.setsid()
    signal.alarm(TIMEOUT)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    for descriptor, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.orig_argv[1:] = words
    sys.argv[:] = words[1:] if words[0] in ("-c", "-m") else words
    sys.argv[0] = words[0]
    place = "" if words[0] in ("-c", "-m") else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [place, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    for seed in (random.seed, numpy.random.seed, torch.seed):
        seed()  # as they are in a new process, no two alike
    sys.modules.pop(BOOT, None)
    sys.meta_path.insert(0, Kept())
    with contextlib.suppress(ModuleNotFoundError):  # only `torchrepro run` brings one
        __import__(BOOT)


def run(words):
    """Run the program as `__main__`, to the status that it ends with."""
    try:
        if words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(words[0]).resolve()), run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
            return 1
        return left.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def leave(status):
    """End this fork as an interpreter ends, without taking apart all that torch is made of."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def look_up_ops():
    """Have torch make its objects for all ops: a program that asks for them finds them."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, packet = name.partition("::")
        packet, _, overload = packet.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


def leave_torch_whole():
    """Have no fork take apart at its end what torch is made of, one library of ops at a time."""
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False


def replace(request, execve, program, command, environment):
    """Stand in for `os.execve`: write down how a Python is to start in place of this fork."""
    if program != sys.executable or (command[1][0] == "-" and command[1] not in ("-c", "-m")):
        execve(program, command, environment)
    anew = [command[1:], {**environment}, str(Path.cwd())]
    os.write(request, json.dumps(anew).encode())
    os._exit(0)


def start(words, environment, folder, streams):
    """Run a program in a fork, and what it is replaced by in another; return the exit status."""
    replaced = None
    while True:
        request = os.memfd_create("request")
        child = os.fork()
        if not child:
            if environment.get(FIRST) == str(replaced):
                environment[FIRST] = str(os.getpid())
            become(words, environment, folder, streams)
            os.execve = functools.partial(replace, request, os.execve)
            leave(run(words))
        _, status = os.waitpid(child, 0)
        anew = os.pread(request, os.fstat(request).st_size, 0)
        os.close(request)
        if not anew:
            return os.waitstatus_to_exitcode(status)
        replaced, (words, environment, folder) = child, json.loads(anew)


def main():
    del sys.path[0]  # the folder of this file
    look_up_ops()
    if sys.argv[1:]:  # a program that imports what the programs of these forks do
        program = sys.argv.pop(1)
        runpy.run_path(program)
    leave_torch_whole()
    gc.freeze()
    for line in sys.stdin:
        print(start(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
