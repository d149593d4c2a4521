"""Fixtures for every test, and the police: no test leaves a trace in the process."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from torchrepro.cli import main
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.knob import MissingState
from torchrepro.knobs.variables import RECORDED

settings.register_profile(
    "torchrepro",
    deadline=None,  # the first example of a test may import a library
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("torchrepro")

NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_", "TRITON_")
"""How the names begin of variables that pytest and torch.compile set as they run."""

OF_THE_RUN = ("PYTEST_", "COV_", "TEST_REPORTS", "SLOW_")
OF_THE_USER = ("TORCHREPRO_", "CUBLAS_", "HYDRA_", "FORCE_COLOR")
"""How the names begin of variables that this test run, or who started it, has a say in."""

HERE = Path(__file__).parent
TOUCHES_TORCH = {
    *("devices", "distributed", "guard", "knobs", "policies", "seeding", "selftest", "trace"),
    *("test_borrowed.py", "test_cudnn_benchmark.py", "test_in_effect.py", "test_seeding_calls.py"),
}
OF_FILES = {"test_damage.py", "test_store.py"}
"""The folders and files of tests that another torch can break: what they try calls its internals.

Left out is what never calls torch (packages, locks, manifests, the files of a trace, what other
tools are told), what calls the internals of a framework, how Hydra composes, and how runs are
started and compared: one torch proves it for all.
"""


def pytest_report_header():
    """Name the libraries whose state the tests read."""
    cuda = torch.version.cuda or "none"
    return f"torch {torch.__version__} (CUDA {cuda}), numpy {np.__version__}, cpus {os.cpu_count()}"


@pytest.hookimpl(tryfirst=True)  # before pytest's own plugin looks where to write
def pytest_configure(config):
    """Write a JUnit report into the folder that TEST_REPORTS names, and have threads wait idly.

    Processes that run side by side have more threads than there are cores. One that waits for
    others by turning in circles, as OpenMP has it, takes as much of a core again as it computes
    with, and the bits are the same. Benchmarks measure what users have.
    """
    if "benchmark" not in config.option.markexpr.replace("not benchmark", ""):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    folder = os.environ.get("TEST_REPORTS")
    if folder:
        config.option.xmlpath = str(Path(folder) / f"{os.getpid()}.xml")


def _touches_torch(path):
    parts = {*path.parts[len(HERE.parts) :]} if path.is_relative_to(HERE) else set()
    return bool(parts & TOUCHES_TORCH) and not parts & OF_FILES


def pytest_ignore_collect(collection_path, config):
    """Where the tests of what calls torch's internals are asked for, import no other file."""
    asked = config.option.markexpr.startswith("touches_torch ")
    is_other = collection_path.name.startswith("test_") and not _touches_torch(collection_path)
    return True if asked and is_other else None


def _leave_a_sample_to_the_daily_run(items):
    """Mark as slow the cases of a test that is marked `sampled(n)`, but the first and one in n.

    Which ones are left follows from their names alone, so that it is the same in every process, and
    is spread over all parameters. Without a number the first alone is left.
    """
    seen = set()
    for item in items:
        _, _, case = item.name.partition("[")
        for mark in item.iter_markers("sampled"):
            chosen = mark.args and crc32(case.encode()) % mark.args[0] == 0
            if item.function in seen and not chosen:
                item.add_marker("slow")
        seen.add(item.function)


def _is_of_another_turn(item):
    """Whether SLOW_TURN is a number, and this slow test has another turn of the five."""
    turn = os.environ.get("SLOW_TURN")
    is_slow = item.get_closest_marker("slow") is not None
    return bool(turn and is_slow and (crc32(item.nodeid.encode()) + int(turn)) % 5)


def pytest_collection_modifyitems(items):
    """Mark the tests of what calls torch's internals, before pytest selects by marks.

    The report is told which tests need hardware.

    The slow ones come first: none of them is left at the end, while all cores but one wait. Those
    of another turn come last. The cases of a table stay together, and so in one process, which
    makes what they share.
    """
    _leave_a_sample_to_the_daily_run(items)
    items.sort(
        key=lambda item: (_is_of_another_turn(item), item.get_closest_marker("slow") is None)
    )
    for item in items:
        if _touches_torch(item.path):
            item.add_marker("touches_torch")
        needs = {mark.name for mark in item.iter_markers()} & {"gpu", "npu"}
        item.user_properties += [("marker", name) for name in sorted(needs)]


@pytest.hookimpl(tryfirst=True)  # before it has fixtures
def pytest_runtest_setup(item):
    """Skip a slow test of another turn that would begin after the time that SLOW_UNTIL names."""
    if _is_of_another_turn(item) and time.time() > float(os.environ["SLOW_UNTIL"]):
        pytest.skip("left to another turn, because this machine is slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leave out of garbage collection what is there by now: all modules, and every test.

    A full collection would take a fifth of a second each time, and a fork would copy what it reads.
    """
    gc.collect()
    gc.freeze()


def read_world():
    """Read every piece of state that a profile could have touched, as plain comparable values."""
    kind, keys, *rest = np.random.get_state()
    return {
        **_read_knobs(knob for knob in CATALOGUE if knob not in FLAGS),
        **_flags_and_variables(),
        "random": random.getstate(),
        "numpy": (kind, keys.tolist(), rest),
        "torch": torch.get_rng_state().tolist(),
    }


def _read_knobs(knobs):
    state: dict[str, Any] = {}
    for knob in knobs:
        try:
            state[knob.name] = knob.access.read()
        except MissingState as missing:
            # An option that inductor lacks is known to be missing once inductor is loaded.
            unset = os.environ.get(knob.variable) if knob.variable else f"missing: {missing}"
            state[knob.name] = unset
    return state


FLAGS = [knob for knob in CATALOGUE if not knob.name.startswith("seed.")]


def _flags_and_variables():
    state = _read_knobs(FLAGS)
    for name, read in _other_names().items():
        try:
            state[name] = read()
        except RuntimeError:
            state[name] = "raises"
    state["environ"] = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}
    return state


def _other_names():
    matmul = torch.backends.cuda.matmul
    return {
        "get_float32_matmul_precision": torch.get_float32_matmul_precision,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "matmul.allow_tf32": lambda: matmul.allow_tf32,
        "are_deterministic": torch.are_deterministic_algorithms_enabled,
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "split_k": lambda: getattr(
            matmul, "allow_fp16_reduced_precision_reduction_split_k", "absent"
        ),
    }


@pytest.fixture
def world():
    """Return the function that reads the world, for tests that compare before and after."""
    return read_world


@pytest.fixture
def clean_environment():
    """The environment without every variable that a profile or this test run has a say in."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RECORDED and not name.startswith(OF_THE_RUN + OF_THE_USER)
    }


@pytest.fixture
def clean_process(clean_environment, monkeypatch):
    """Give this process that environment, and what pytest needs."""
    for name in os.environ.keys() - clean_environment.keys():
        if not name.startswith(OF_THE_RUN):
            monkeypatch.delenv(name)


@pytest.fixture
def execute(tmp_path, clean_environment):
    """Run a command in `tmp_path`; variables in `env` are added to the clean environment."""

    def execute(*command, env=None, stdin="", cwd=tmp_path):
        return subprocess.run(
            [str(word) for word in command],
            **({"input": stdin} if stdin else {"stdin": subprocess.DEVNULL}),
            env={**clean_environment, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return execute


@contextmanager
def forks_of(*programs, **variables):
    """Run programs in forks of one Python that has torch, and what `programs` have imported.

    It was started with these variables.
    """
    ours = ("TORCHREPRO_", "MALLOC_", "TZ", "PYTHON")
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("forked_python.py"), *programs],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "PYTHONHASHSEED": "0",
            **variables,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def fork(words, environment, folder, streams):
            line = [[*map(str, words)], environment, str(folder), [*map(str, streams)]]
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield fork
        process.stdin.close()


@pytest.fixture(scope="session")
def forks():
    """Begin a Python that has torch and what a program has imported, to run others in forks."""
    return forks_of


@pytest.fixture(scope="session")
def fork():
    """Run programs in forks of one Python that has torch; returns the exit status of each.

    For laws about what a program computes and says; how a Python starts has tests of its own.
    """
    with forks_of() as fork:
        yield fork


@pytest.fixture(scope="session")
def fork_with_other_kernels():
    """Run programs in forks of a Python that torch started in without any vector extension."""
    with forks_of(ATEN_CPU_CAPABILITY="default") as fork:
        yield fork


@pytest.fixture
def fork_python(fork, tmp_path, clean_environment):
    """Run Python with these arguments in `tmp_path`, in a fork of one that has torch.

    Its PYTHONHASHSEED was 0 when it started, whatever its environment says.
    """

    def fork_python(*arguments, env=None, stdin=""):
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("in", "out", "err")]
            for path in streams:
                path.write_text(stdin if path.name == "in" else "", encoding="utf-8")
            status = fork(arguments, {**clean_environment, **(env or {})}, tmp_path, streams)
            texts = [path.read_text(encoding="utf-8") for path in streams[1:]]
        return subprocess.CompletedProcess(arguments, status, *texts)

    return fork_python


@pytest.fixture
def command(capsys, monkeypatch):
    """Run a command in this process; returns its status, stdout and stderr.

    It has 80 columns for its help, however wide the terminal of these tests is.
    """
    monkeypatch.delenv("COLUMNS", raising=False)

    def command(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        streams = capsys.readouterr()
        return ended.value.code or 0, streams.out, streams.err

    return command


@pytest.fixture
def answer(command):
    """Run a command with --json; returns its status and the one document on stdout."""

    def answer(*words):
        status, out, err = command(*words, "--json")

        assert err == ""
        return status, json.loads(out)

    return answer


@pytest.fixture
def golden(request):
    """Hold answers, by what was asked, to a file in `golden/` beside the test.

    Where GOLDEN=write is set the file is written anew, and is to be read before it is committed.
    """

    def golden(name, answers):
        text = "\n".join(f"== {asked}\n{answer.strip()}\n" for asked, answer in answers.items())
        file = request.path.parent / "golden" / name
        if os.environ.get("GOLDEN") == "write":
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()

    return golden


@pytest.fixture(autouse=True, scope="session")
def _children_take_signals():
    """Let signals that are ignored here, as under `nohup` or `&`, reach what the tests start.

    A program inherits that a signal is ignored, and gets the default of one that has a handler.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def _device_in_use():
    """Use an accelerator once, where there is one: first use settles what it leaves open."""
    if torch.accelerator.is_available():
        torch.ones(1, device=torch.accelerator.current_accelerator())


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    """Fail a test after which a flag or a variable is not what it was before."""
    before = _flags_and_variables()
    yield
    assert before == _flags_and_variables()
