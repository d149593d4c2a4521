"""Device meshes: real ones of torch, over a process group that only pretends to communicate."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import torchrepro

NAMES = ("dp", "tp", "pp")
START = """
import json, random, sys
import numpy as np, torch, torch.distributed as dist, torchrepro
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrepro.seeding.streams import coordinate

def on_every_rank(size, work):
    answers = []
    for rank in range(size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        answers.append(work())
        dist.destroy_process_group()
    return answers

def draws():
    return [random.random(), np.random.random_sample(), torch.rand(()).item()]

def message(call, *arguments):
    try:
        call(*arguments)
    except torchrepro.SeedingError as error:
        return str(error)
"""
PLACES = """
def work():
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "pp"))
    with torchrepro.apply(profile):
        draws()
        torchrepro.use_mesh(mesh)
        stream, in_scope = torchrepro.stream("augment").seed, []
        for ranks in (None, "same", {"dp": "same", "pp": "same", "tp": "distinct"}):
            with torchrepro.seeded("init", ranks=ranks):
                in_scope.append(draws())
        return [draws(), stream, *in_scope]

profiles, shapes = json.loads(sys.argv[1])
answers = []
for profile in profiles:
    answers.append([])
    for shape in map(tuple, shapes):
        answers[-1].append(on_every_rank(torch.Size(shape).numel(), work))
print(json.dumps(answers))
"""
SHAPES = [(2, 2, 1), (1, 4, 1), (3, 2, 2)]  # tests/seeding/test_ranks.py tries any


def _groups(shape: tuple[int, ...], numbers: list[Any], along: str) -> None:
    axes = [NAMES.index(name) for name in along.split()]
    places = list(product(*map(range, shape)))  # torch numbers the ranks of a mesh row by row
    seen: dict[tuple[int, ...], str] = {}
    for place, number in zip(places, map(str, numbers), strict=True):
        assert seen.setdefault(tuple(place[axis] for axis in axes), number) == number
    assert len(set(seen.values())) == len(seen)


POLICIES = [  # `ranks`, then along which dimensions global generators and streams differ
    (None, "", "dp pp"),
    ("distinct", "dp pp", "dp pp"),
    ({"dp": "same", "tp": "distinct"}, "tp pp", "tp pp"),
    ({"tp": "distinct"}, "dp tp pp", "dp tp pp"),
    ({"pp": "same"}, "dp", "dp"),
    ("same", "", ""),
]


def test_ranks_differ_along_the_dimensions_that_the_profile_says(
    forked_answer_of: Callable[..., Any],
) -> None:
    """Data-parallel ranks differ pairwise and tensor-parallel ones agree, unless told otherwise."""
    profiles = [{"seed": 1234} | ({"ranks": ranks} if ranks else {}) for ranks, *_ in POLICIES]

    answers = forked_answer_of(START + PLACES, json.dumps([profiles, SHAPES]))

    for (_, globals_along, streams_along), of_profile in zip(POLICIES, answers, strict=True):
        for shape, of_ranks in zip(SHAPES, of_profile, strict=True):
            drawn, streams, usual, same, turned = zip(*of_ranks, strict=True)
            _groups(shape, drawn, globals_along)
            _groups(shape, streams, streams_along)
            _groups(shape, usual, streams_along)
            _groups(shape, same, "")
            _groups(shape, turned, "tp")


def test_rank_0_of_a_mesh_draws_what_a_lone_run_draws(forked_answer_of: Callable[..., Any]) -> None:
    """Where ranks differ, the first along every dimension starts from the seed itself."""
    program = """
def work():
    with torchrepro.apply({"seed": 5, "ranks": "distinct"}):
        torchrepro.use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        return draws()

with torchrepro.apply({"seed": 5}):
    alone = draws()
print(json.dumps([alone, on_every_rank(4, work)]))
"""
    alone, (first, second, *others) = forked_answer_of(START + program)

    assert first == second == alone
    assert alone not in others


def test_a_mesh_goes_with_the_profile(forked_answer_of: Callable[..., Any]) -> None:
    """Undo forgets the mesh and puts the generators back; an inner profile keeps the mesh."""
    program = """
def work():
    with torchrepro.apply({"seed": 5, "ranks": "distinct"}):
        lone = torchrepro.stream("augment").seed
    before = draws_ahead()
    with torchrepro.apply({"seed": 5, "ranks": "distinct"}):
        torchrepro.use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        known = torchrepro.stream("augment").seed
        with torchrepro.apply({"dropout": "keep"}):
            inner = torchrepro.stream("augment").seed
    after = draws_ahead()
    with torchrepro.apply({"seed": 5, "ranks": "distinct"}):
        again = torchrepro.stream("augment").seed
    return before == after, known == inner, known != lone, lone == again

def draws_ahead():
    with torchrepro.isolated_rng():
        return draws()

print(json.dumps(on_every_rank(4, work)))
"""
    answer = forked_answer_of(START + program)

    assert answer[1:] == [[True, True, True, True]] * 3
    assert answer[0] == [True, True, False, True]


BAD = """
from torchrepro.seeding import streams
profile = json.loads(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
torchrepro.apply(profile)
named = {"mesh_dim_names": ("dp", "tp")}
meshes = {
    "good": lambda: init_device_mesh("cpu", (2, 2), **named),
    "no names": lambda: init_device_mesh("cpu", (2, 2)),
    "left out": lambda: DeviceMesh("cpu", [[0, 1]], **named),
}
mesh = meshes[sys.argv[2]]()
before = random.getstate(), torch.get_rng_state().tolist(), streams.current_plan()
refused = message(torchrepro.use_mesh, mesh)
after = random.getstate(), torch.get_rng_state().tolist(), streams.current_plan()
print(json.dumps([refused, before == after]))
"""


@pytest.mark.parametrize(
    ("ranks", "mesh", "words"),
    [
        ("distinct", "no names", ("has no names", "mesh_dim_names")),
        ("distinct", "left out", ("leaves this rank out",)),
        ({"dpp": "same"}, "good", ("ranks.dpp", "legal: dp, tp", "did you mean: dp")),
    ],
)
def test_a_mesh_that_says_too_little_is_refused(
    ranks: Any, mesh: str, words: tuple[str, ...], forked_answer_of: Callable[..., Any]
) -> None:
    """The message says what the mesh lacks, and nothing has changed."""
    profile = json.dumps({"seed": 5, "ranks": ranks})

    refused, unchanged = forked_answer_of(START + BAD, profile, mesh)

    assert [word for word in words if word not in refused] == []
    assert unchanged


@pytest.mark.parametrize("given", [None, 3, [[0, 1]]])
@pytest.mark.parametrize("profile", [{}, {"seed": 5}])
def test_what_is_no_mesh_is_refused(given: Any, profile: Any) -> None:
    """`use_mesh` of something that is no mesh raises `SeedingError`, under a profile or not."""
    refused = pytest.raises(torchrepro.SeedingError, match="not a device mesh")
    with torchrepro.apply(profile), refused:
        torchrepro.use_mesh(given)
