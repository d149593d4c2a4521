"""Scripts started on two ranks, which meet on the loopback interface."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
RANKS = """
import os, random, runpy, signal, socket, sys, time
import numpy.random, torch
import torch.distributed as dist

sys.argv.pop(0)
sys.path[0] = os.path.dirname(sys.argv[0])
door = socket.create_server(("127.0.0.1", 0))
address, port = door.getsockname()
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
ranks = set()
for rank in range(2):
    ranks.add(os.fork())
    if 0 in ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        signal.alarm(500)
        for seed in (random.seed, numpy.random.seed, torch.seed):
            seed()  # as they are in a new process
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
settings = {"wait_for_workers": False, "master_listen_fd": door.detach()}
store = dist.TCPStore(address, port, None, True, **settings)
failed = False
while ranks:
    pid, status = os.wait()
    ranks.discard(pid)
    if status and not failed:  # one that fails ends the others, a little later
        failed = True
        time.sleep(0.5)
        for other in ranks:
            os.kill(other, signal.SIGTERM)
sys.exit(failed)
"""
"""Runs a program on two ranks as torchrun does, in forks of a Python that has torch."""


_OWN = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _script(folder, script):
    if isinstance(script, Path):
        return script
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whatever starts two ranks is slow."""
    for item in items:
        if {"on_two_ranks", "by_torchrun"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")


@pytest.fixture
def on_two_ranks(tmp_path, fork_python):
    """Run the text of a script on two ranks, which are forks of a Python that has torch."""

    def run(script, *words, env=None):
        path = _script(tmp_path, script)
        return fork_python("-c", RANKS, path, *words, env={**_OWN, **(env or {})})

    return run


@pytest.fixture
def by_torchrun(tmp_path, execute):
    """Start a script, or the text of one, on two ranks by torchrun."""

    def run(script, *words, before=()):
        path = _script(tmp_path, script)
        return execute(*before, *TORCHRUN, path, *words, env=_OWN)

    return run


@pytest.fixture
def distributed_digits():
    """Return the path of the example that trains on several processes."""
    return EXAMPLES / "digits_distributed.py"
