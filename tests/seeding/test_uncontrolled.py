"""Sources of nondeterminism are recorded at the line of the program; functions stay the same."""

import _thread
import contextlib
import inspect
import json
import linecache
import os
import pickle
import random
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchrepro
from torchrepro.seeding.call_records import ObservedCall
from torchrepro.seeding.nondeterministic_calls import (
    CHEAP_SOURCES,
    ENTROPY,
    ENVIRONMENT,
    EVERY_SOURCE,
    EXISTING_FILE,
    FORKED,
    GIVEN_SEEDS,
    UNSEEDED,
)
from torchrepro.seeding.nondeterministic_reads import Watch
from torchrepro.seeding.observed_calls import _owner
from torchrepro.seeding.seeding_calls import seeding_calls

READS = {
    "numpy.random.default_rng()": "numpy.random.default_rng(None).random()",
    "random.Random()": "random.Random().random()",
    "random.SystemRandom()": "random.SystemRandom().choice('abc')",
    "os.urandom()": "os.urandom(4)",
    "secrets.randbits()": "secrets.randbits(8)",
    "secrets.token_hex()": "secrets.token_hex()",
    "uuid.uuid4()": "uuid.uuid4()",
    "uuid.uuid1()": "uuid.uuid1()",
    "random.seed()": "random.seed()",
    "numpy.random.seed()": "numpy.random.seed()",
    "torch.seed()": "torch.seed()",
    "numpy.random.default_rng(5)": "numpy.random.default_rng(5)",
    "random.Random(5)": "random.Random(x=5)",
    "random.seed(5)": "random.seed(a=5)",
    "numpy.random.seed(5)": "numpy.random.seed(numpy.int64(5))",
    "torch.manual_seed(5)": "torch.manual_seed(seed=5)",
    "torch.cuda.manual_seed(5)": "torch.cuda.manual_seed(5)",
    **{f"time.{clock}()": f"time.{clock}()" for clock in ("time", "monotonic", "perf_counter")},
    **{f"time.{clock}_ns()": f"time.{clock}_ns()" for clock in ("time", "monotonic")},
    "time.process_time()": "time.process_time()",
    "time.clock_gettime()": "time.clock_gettime(time.CLOCK_REALTIME)",
    "time.localtime()": "time.localtime()",
    "time.gmtime()": "time.gmtime()",
    "time.ctime()": "time.ctime()",
    "time.strftime()": "time.strftime('%H')",
    "os.getpid()": "os.getpid()",
    "os.getppid()": "os.getppid()",
    "socket.gethostname()": "socket.gethostname()",
    "platform.node()": "platform.node()",
    "os.uname()": "os.uname()",
    "builtins.id()": "{id(os): 1}",
    "builtins.hash()": "hash((1, 'text'))",
    "os.listdir()": "os.listdir('.')",
    "os.scandir()": "os.scandir('.').close()",
    "os.walk()": "list(os.walk('.'))",
    "glob.glob()": "glob.glob('*')",
    "pathlib.Path.iterdir()": "list(pathlib.Path().iterdir())",
    "threading.Thread.start()": "threading.Thread(target=int).start()",
    "concurrent.futures.thread.ThreadPoolExecutor.submit()": "with Pool(1) as p: p.submit(int)",
}
"""Recorded name -> a line of a program that reads it."""

BEFORE = """
import concurrent.futures, glob, os, pathlib, platform, random, secrets, socket, threading, time
import uuid
import numpy.random, torch
Pool = concurrent.futures.ThreadPoolExecutor
"""
CLEAN = """
import logging, multiprocessing, os, random, tempfile
import numpy as np, torch

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return np.random.default_rng([1, index]).random(2) + random.random()

random.seed(1), np.random.seed(1), torch.manual_seed(1)
random.random(), random.Random(3).random(), np.random.rand(), torch.rand(2), hash(5), hash((1, 2))
for workers in (0, 2):
    for batch in torch.utils.data.DataLoader(Noise(), 4, shuffle=True, num_workers=workers):
        torch.nn.Linear(2, 2)(batch.float()).sum().backward()
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:
    logging.getLogger("clean").warning("said at some time")
with multiprocessing.get_context("fork").Pool(1) as pool:
    pool.map(abs, [1, 2])
import mailbox, xmlrpc.client, torch.distributions
"""


@pytest.fixture(autouse=True)
def _generators_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with torchrepro.isolated_rng():
        yield


def _run(program: str, name: str = "program.py") -> None:
    exec(compile(BEFORE if name == "before.py" else program, name, "exec"), _names)


_names: dict[str, Any] = {"__name__": "program"}


@contextlib.contextmanager
def _watched(rows: Any = EVERY_SOURCE, folder: Path | None = None) -> Iterator[Watch]:
    watch = Watch(rows, folder=None if folder is None else str(folder))
    try:
        yield watch
    finally:
        watch.stop()


def _functions() -> dict[tuple[str, str], Any]:
    found = {}
    for row in EVERY_SOURCE:
        owner, name = _owner(row.module, row.attribute)
        found[row.module, row.attribute] = getattr(owner, name, None)
    return found


@pytest.mark.parametrize("told", READS)
def test_a_read_is_recorded_at_the_line_of_the_program(told: str) -> None:
    """With the name of the called function, line, seed and count."""
    _run("", "before.py")
    program = f"for _ in range(3):\n    {READS[told]}\n"
    with _watched() as watch:
        _run(program)
    (read,) = watch.reads()

    assert f"{read.name}({read.value or ''})" == told
    assert read.where == "program.py:2"
    assert read.times >= 3
    assert (read.step, read.record) == (-1, 0)
    assert read.instead


def test_every_row_is_tested() -> None:
    """A program above reads each row of the table, except devices and some clocks."""
    lines = " ".join(READS.values())
    own = ("torch.cuda", "torch.npu", "torch.xpu", "torch.mps", "torch.random")
    rows = [row for row in EVERY_SOURCE if not row.module.startswith(own)]

    assert [
        row.name
        for row in rows
        if row.attribute.rpartition(".")[2].removesuffix("_ns") not in lines
        and row.known_as not in lines
    ] == []


def test_a_reproducible_program_has_no_reads() -> None:
    """Seeded draws, loaders with workers, temporary files, processes, logs and imports."""
    with _watched((*UNSEEDED, *ENVIRONMENT)) as watch:
        _run(CLEAN, "clean.py")

    assert watch.reads() == ()


GENERATORS = {
    "default_rng": "numpy.random.default_rng()",
    "Random": "random.Random()",
    "RandomState": "numpy.random.RandomState()",
    "seeded with the clock": "random.Random(time.time())",
}
"""How a library makes a generator whose numbers differ in each run."""


def _library(name: str, makes: str) -> dict[str, Any]:
    text = f"""
import random, time
import numpy
at_import = {makes}
class Sampler:
    def __init__(self, generator=None):
        self.generator = generator or self._make()
    def _make(self):
        return {makes}
    def __call__(self):
        return self.generator.random()
"""
    file = f"{sysconfig.get_path('purelib')}/{name}.py"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, file, "exec"), names)
    return names


@pytest.mark.parametrize("makes", GENERATORS.values(), ids=GENERATORS)
def test_a_librarys_generator_is_recorded_at_the_line_that_called_the_library(makes: str) -> None:
    """Under the library's function; if unseeded only once it draws, and not during the import."""
    is_seeded = "time" in makes
    program = "lib['Sampler']()\nsampler = lib['Sampler']()\nsampler()\nlib['at_import'].random()"
    with _watched((*UNSEEDED, *GIVEN_SEEDS)) as watch:
        _names["lib"] = _library("some_library", makes)
        _run(program)
    reads = watch.reads()

    assert [read.name for read in reads] == ["some_library.Sampler"] * (1 + is_seeded)
    assert reads[-1].where == "program.py:2"
    assert reads[-1].instead == "give some_library.Sampler a seed, as its documentation says"
    assert all(bool(read.value) == is_seeded for read in reads)


@pytest.mark.parametrize("makes", GENERATORS.values(), ids=GENERATORS)
def test_internal_draws_of_libraries_are_not_recorded(makes: str) -> None:
    """A package may draw for names of files, waits or progress bars."""
    with _watched((*UNSEEDED, *GIVEN_SEEDS)) as watch:
        _names["lib"] = _library("tqdm", makes)
        _run("lib['Sampler']()()")

    assert watch.reads() == ()


def test_a_generator_made_from_another_one_is_not_recorded() -> None:
    """It is neither an explicit seed nor a draw without a seed."""
    own = np.random.PCG64(1)
    _names["own"] = own
    with _watched() as watch:
        _run("import numpy\nnumpy.random.default_rng(own)")

    assert watch.reads() == ()


def test_long_seeds_have_different_texts() -> None:
    """Equal seeds of any length have equal texts, different seeds different ones."""
    seeds = [[1] * 50, [1] * 49 + [2], 2**300, 2**300 + 1, "a" * 100, "a" * 99 + "b"]
    texts = []
    for seed in (*seeds, *seeds):
        _names["seed"] = str(seed) if isinstance(seed, list) else seed
        with _watched() as watch:
            _run("import random\nrandom.seed(seed)")
        texts += [read.value for read in watch.reads()]

    assert texts[: len(seeds)] == texts[len(seeds) :]
    assert len(set(texts)) == len(seeds)


@pytest.mark.parametrize("name", ["SeedSequence", "RandomState", "PCG64", "Philox"])
def test_unseeded_types_of_numpy_are_recorded_at_their_line(tmp_path: Path, name: str) -> None:
    """They cannot be replaced, so the text of the line shows that they get no seed."""
    program = tmp_path / "program.py"
    program.write_text(
        f"from numpy.random import {name}\nmade = {name}(), {name}(None)\n{name}(5)\n"
        "for each in made:\n    hasattr(each, 'rand') and each.rand()\n"
    )
    with _watched() as watch:
        exec(compile(program.read_text(), str(program), "exec"), {"__name__": "program"})

    assert [(read.name, read.what, read.where, read.times) for read in watch.reads()] == [
        (f"numpy.random.{name}", ENTROPY, f"{program}:2", 2)
    ]


@given(st.data())
def test_undo_is_exact_in_any_order(data: st.DataObject) -> None:
    """After the last watch stops, the original functions are back, in any order of the stops."""
    before = _functions()
    some_rows = st.lists(st.sampled_from(EVERY_SOURCE), max_size=9)
    several = data.draw(st.lists(some_rows, min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(several))))
    undo = [Watch(rows).stop if rows else seeding_calls.begin() for rows in several]
    for number in order:
        undo[number]()

    after = _functions()
    assert all(after[place] is before[place] for place in before)


def test_wrapped_functions_behave_as_the_originals() -> None:
    """Signature, name, pickling, sets and errors are the same, and a class does not bind them."""

    def looks(function: Any) -> tuple[Any, ...]:
        with contextlib.suppress(ValueError):
            return function.__name__, function.__doc__, inspect.signature(function)
        return function.__name__, function.__doc__

    class Timer:
        clock = time.time

    places = [place for place, function in _functions().items() if function is not None]
    before = {place: looks(_functions()[place]) for place in places}
    with _watched():

        class WatchedTimer:
            clock = time.time

        assert {place: looks(_functions()[place]) for place in places} == before
        seeding = random.seed, np.random.seed, random.Random.seed, torch.cuda.manual_seed
        for function in (*seeding, np.random.default_rng, os.urandom, os.listdir, id):
            assert pickle.loads(pickle.dumps(function)) is function
        assert os.scandir in os.supports_fd
        assert type(WatchedTimer().clock()) is type(Timer().clock()) is float
        assert isinstance(random.SystemRandom(), random.Random)
        assert random.Random(4).random() == random.Random(4).random()
        with pytest.raises(FileNotFoundError):
            os.scandir("nowhere")
        with pytest.raises(TypeError):
            os.urandom()  # type: ignore[call-arg]


def test_a_thread_that_runs_a_watched_function_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call without a line of Python succeeds, and is not recorded."""
    own = random.Random(1)
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    ended = threading.Event()
    with _watched() as watch:
        for function, given in ((time.time, ()), (random.Random.seed, (own, 1))):
            _thread.start_new_thread(function, given)
        _thread.start_new_thread(ended.set, ())
        assert ended.wait(60)
        time.sleep(0.1)

    assert raised == []
    assert watch.reads() == ()


def test_code_without_a_module_is_recorded() -> None:
    """Generated code whose globals have no name is recorded under the name of the function."""
    names = {"seed": 5}
    with _watched() as watch:
        names["call"] = random.seed  # type: ignore[assignment]
        exec(compile("def __made():\n    call(seed)\n", "<made>", "exec"), names)
        _names["made"] = names["__made"]
        _run("made()")

    assert [(read.name, read.where) for read in watch.reads()] == [("random.seed", "program.py:1")]


def test_an_error_of_a_listener_does_not_fail_the_call() -> None:
    """Arguments that raise when they are inspected reach the function unchanged."""

    class Odd:
        def __hash__(self) -> int:
            return 5

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise RuntimeError("not now")

    with _watched():
        assert hash(Odd()) == 5
        assert hash((Odd(), 1)) == hash((Odd(), 1))


def test_the_hash_of_a_nested_tuple_is_recorded_if_it_contains_text() -> None:
    """Text at any depth makes a hash vary; numbers do not."""
    for leaf, noted in ((1, 0), ("text", 1)):
        _names["deep"] = (leaf,)
        for _ in range(3000):
            _names["deep"] = (_names["deep"],)
        with _watched() as watch:
            _run("hash(deep)")

        assert len(watch.reads()) == noted


STRICT = {"seed": 1, "guarantee": "repeatable"}


def test_a_strict_report_names_the_first_unseeded_draw(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report of a strict profile has each such function with its line and a fix."""
    before = _functions()
    with torchrepro.apply(STRICT) as applied:
        _run("import numpy\n" + 2 * "numpy.random.default_rng().random()\n")
        during = str(applied)
    os.urandom(1)
    (read, other) = applied.report.unseeded

    assert (read.name, read.where, read.times) == ("numpy.random.default_rng", "program.py:2", 1)
    assert other.where == "program.py:3"
    assert during == str(applied)
    told = " ".join(during.split())
    assert "drew without a seed: numpy.random.default_rng() at program.py:2" in told
    assert 'pass a seed: numpy.random.default_rng(1234), or torchrepro.stream("name")' in told
    assert told.count("drew without") == 1
    assert applied.report.to_json()["unseeded"][0] == read.to_json()
    assert all(now is before[place] for place, now in _functions().items())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("profile", [{"seed": 1}, {"dropout": "keep"}], ids=["seed", "none"])
def test_other_profiles_watch_no_draws(profile: dict[str, Any]) -> None:
    """Without a guarantee of identical bits no function is wrapped."""
    own = np.random.default_rng, os.urandom, random.SystemRandom.random
    with torchrepro.apply(profile) as applied:
        assert own == (np.random.default_rng, os.urandom, random.SystemRandom.random)
        os.urandom(1)

    assert applied.report.unseeded == ()


def test_draws_of_torchrepro_are_not_recorded(tmp_path: Path) -> None:
    """Profiles, scopes, loaders and recordings do not count as draws or seeds of the program."""
    with _watched((*UNSEEDED, *GIVEN_SEEDS)) as watch:
        _names["folder"] = str(tmp_path / "out")
        _run(
            "import torch, torchrepro\n"
            "with torchrepro.apply({'seed': 1}), torchrepro.seeded('init'):\n"
            "    torchrepro.set_rng_state(torchrepro.rng_state())\n"
            "    torchrepro.stream('x').numpy(), torchrepro.stream('x').python()\n"
            "    list(torch.utils.data.DataLoader(range(4), shuffle=True))\n"
            "    with torchrepro.record(folder) as recording:\n"
            "        torch.ones(2) + 1\n"
            "        recording.end_step()\n"
        )

    assert watch.reads() == ()


def test_at_most_1000_lines_with_reads_are_recorded() -> None:
    """The first 1000 lines keep their records and counts."""
    with _watched() as watch:
        for _ in range(2):
            exec(compile("os.getpid()\n" * 1500, "long.py", "exec"), {"os": os, "__name__": "p"})

    assert [read.where for read in watch.reads()] == [f"long.py:{line}" for line in range(1, 1001)]
    assert {read.times for read in watch.reads()} == {2}


CHILDREN = """
import multiprocessing, os, random, sys, time
from concurrent.futures import ProcessPoolExecutor
from random import random as draw_one
import numpy as np
import torch
context = multiprocessing.get_context("fork")

def draws(item):
    random.shuffle([1, 2])  # draws: random.shuffle
    random.shuffle([1, 2])
    draw_one()  # draws: random.random
    np.random.rand()  # draws: numpy.random.rand in a pool
    torch.rand(2)  # draws: torch.rand in a pool

def seeded(item):
    random.seed(item), np.random.seed(item), torch.manual_seed(item)
    return random.random() + np.random.rand() + float(torch.rand(1))

def seed_once():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)

def by_pool(function, initializer=None):
    with context.Pool(2, initializer) as pool:
        pool.map(function, range(4))

def by_executor(function):
    with ProcessPoolExecutor(2, context) as pool:
        list(pool.map(function, range(4)))

def by_process(function):
    for process in [context.Process(target=function, args=(1,)) for _ in range(2)]:
        process.start()
        process.join()

def by_fork(function):
    child = os.fork()
    if not child:
        function(1)
        os._exit(0)
    os.waitpid(child, 0)

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        draws(index)
        return index

def by_loader(function):
    list(torch.utils.data.DataLoader(Noise(), num_workers=2))

def seeds_of_its_own(worker):
    np.random.seed(os.getpid() + worker), time.time()

def in_workers(function):
    list(torch.utils.data.DataLoader(Noise(), num_workers=2, worker_init_fn=function))
"""


def _children(call: str, folder: Path) -> tuple[ObservedCall, ...]:
    """Return the reads of a watch after children of a program have run in `folder`."""
    place = folder / "children.py"
    place.write_text(CHILDREN, encoding="utf-8")
    module = sys.modules["children"] = ModuleType("children")
    module.__file__ = str(place)
    with _watched(CHEAP_SOURCES, folder) as watch:
        exec(compile(CHILDREN, str(place), "exec"), vars(module))
        exec(compile(call, str(place), "exec"), vars(module))
        found = watch.reads()

    assert [each.name for each in folder.iterdir()] == ["children.py"]
    return found


@pytest.mark.parametrize(
    ("call", "said"),
    {
        "by_pool(draws)": ["draws", "in a pool"],
        "by_executor(draws)": ["draws", "in a pool"],
        "by_pool(draws, seed_once)": ["draws", "in a pool"],
        "by_process(draws)": ["draws"],
        "by_fork(draws)": ["draws"],
        "by_loader(draws)": [],
        "by_pool(seeded)": [],
        "by_process(seeded)": [],
        "draws(1)": [],
    }.items(),
)
def test_draws_of_forked_children_are_recorded_if_they_vary(
    call: str, said: list[str], tmp_path: Path
) -> None:
    """Python's in any child, numpy's and torch's if a pool hands out tasks; none that a task
    has seeded, none in workers of a loader, and none in the main process.
    """
    reads = _children(call, tmp_path)

    marked = [
        (*found.groups(), number)
        for number, text in enumerate(CHILDREN.splitlines(), 1)
        if (found := re.search(r"# draws: (\S+)(?: (in a pool))?$", text))
        and (found[2] or "draws") in said
    ]
    found = {(read.name, read.where) for read in reads if read.what == FORKED}
    assert found == {(name, f"{tmp_path}/children.py:{line}") for name, _, line in marked}


def test_a_module_that_a_child_imports_is_observed() -> None:
    """A fork imports nothing: numpy's random module is imported and observed at its first use.

    Its types draw from the system first, even with an explicit seed; that is not recorded.
    """
    code = """
import os, random, sys, tempfile
from torchrepro.seeding.nondeterministic_reads import CHEAP_SOURCES, Watch
for name in [name for name in sys.modules if name.partition(".")[0] in ("numpy", "secrets")]:
    del sys.modules[name]
watch = Watch(CHEAP_SOURCES, folder=tempfile.mkdtemp())
program = \"\"\"
import numpy
before = set(sys.modules)
if not os.fork():
    more = set(sys.modules) - before
    import numpy.random
    print(sorted(more), type(numpy.random.rand).__name__, flush=True)
    os._exit(0)
os.wait()
numpy.random.RandomState(3).rand(), numpy.random.Generator(numpy.random.PCG64(5)).random()
\"\"\"
exec(compile(program, "program.py", "exec"), {"os": os, "sys": sys, "__name__": "program"})
print(watch.reads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[] _BuiltIn\n()\n"


def test_reads_and_seeds_of_forked_children_are_recorded(tmp_path: Path) -> None:
    """Workers that seed from their process have one line, and one text for all seeds."""
    reads = _children("in_workers(seeds_of_its_own)", tmp_path)
    line = CHILDREN.splitlines().index(next(x for x in CHILDREN.splitlines() if "getpid" in x)) + 1

    of_line = {read.name: read for read in reads if read.where == f"{tmp_path}/children.py:{line}"}
    assert of_line.keys() == {"os.getpid", "numpy.random.seed", "time.time"}
    assert re.fullmatch(r"\d+ and 1 more #[0-9a-f]{8}", of_line["numpy.random.seed"].value or "")
    assert [read.value for read in _children("by_process(seeded)", tmp_path)] == ["1", "1", "1"]
    several = {read.name: read.value for read in _children("by_pool(seeded)", tmp_path)}
    assert several == {read.name: read.value for read in _children("by_executor(seeded)", tmp_path)}


def test_an_incomplete_note_of_a_killed_child_is_skipped(tmp_path: Path) -> None:
    """It raises nothing, and earlier notes count."""
    told = tmp_path / f"told-{os.getpid()}.jsonl"
    with _watched(CHEAP_SOURCES, tmp_path) as watch:
        good = ObservedCall("time.time", "the clock", "a.py:1", step=0)
        text = json.dumps({"kind": "read", **good.to_json()})
        told.write_text(f"{text}\n{text[:30]}")

        assert watch.reads() == (good,)


FILES_USED = """
import json, os, pathlib
import numpy as np
import torch
if os.path.exists("cache.npy"):
    np.load("cache.npy")
np.save("made.npy", np.ones(2))
if pathlib.Path("made.npy").exists():
    np.load("made.npy")
torch.save({}, "state.pt")
torch.load("state.pt")
pathlib.Path("told.json").write_text("{}")
json.loads(pathlib.Path("told.json").read_text())
open(pathlib.__file__).close(), open("/proc/self/stat").close()
with open("log", "a") as log: log.write("x")
open("log", "r+").close(), open("state.pt", "rb+").close()
open("n", "x").close(), open("n", "r+").close()
open(0, closefd=False).fileno()
"""


def test_files_are_recorded_with_the_lines_that_use_them(tmp_path: Path) -> None:
    """Also files that a library opens for the program; an earlier file counts as a read."""
    np.save("cache.npy", np.ones(1))
    time.sleep(0.05)
    folder = tmp_path / "out"
    with _watched(CHEAP_SOURCES, folder) as watch:
        exec(compile(FILES_USED, str(tmp_path / "p.py"), "exec"), {"__name__": "p"})
        reads = watch.reads()

    lines = {
        Path(each["path"]).name: [
            int(each[use].rpartition(":")[2] or 0) for use in ("asked", "read", "written")
        ]
        for each in watch.files.to_json()["files"]
    }
    assert lines == {
        "cache.npy": [5, 6, 0],
        "made.npy": [8, 9, 7],
        "state.pt": [0, 11, 10],
        "told.json": [0, 13, 12],
        "log": [0, 16, 15],
        "n": [0, 17, 17],
    }
    assert [(read.name, read.what, read.where) for read in reads] == [
        ("cache.npy", EXISTING_FILE, f"{tmp_path}/p.py:6")
    ]
