"""Ranks, also of device meshes: which processes draw the same numbers, and which differ.

The meshes are torch's own, over a process group that communicates with nothing.
"""

import json
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchrepro
from torchrepro.seeding.global_seeds import seed_as_this_rank
from torchrepro.seeding.streams import AGREEING, Mesh, SeedPlan, World, seed_of_rank, world

LAUNCHERS = [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")]
NO_NUMBERS = ("", "-1", "one", "1.0", "0x1", " 1", "\uff11", "1" * 5000)  # the last for Python
Place = Callable[..., None]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": 3, "WORLD_SIZE": 8},
        {"SLURM_PROCID": 3, "SLURM_NTASKS": 8},
        {"SLURM_PROCID": 1, "SLURM_NTASKS": 4, "RANK": 3, "WORLD_SIZE": 8},
    ],
    ids=["torchrun", "Slurm", "torchrun on a node of Slurm"],
)
def test_the_rank_comes_from_the_variables_of_a_launcher(
    variables: dict[str, int], seed_1234: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank, size and streams follow the variables of torchrun or Slurm."""
    alone = torchrepro.stream("augment")
    assert world() == World(1, 0)
    for name, number in variables.items():
        monkeypatch.setenv(name, str(number))

    assert world() == World(8, 3)
    assert torchrepro.stream("augment") == torchrepro.stream("augment", rank=3) != alone
    assert torchrepro.stream("augment", rank=0) == alone


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("variable", [name for pair in LAUNCHERS for name in pair])
def test_a_variable_without_a_number_is_refused(
    variable: str, text: str, seed_1234: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the variable and its value, and no stream is returned."""
    for rank, size in LAUNCHERS:
        if variable in (rank, size):
            monkeypatch.setenv(rank, "0")
    monkeypatch.setenv(variable, text)

    with pytest.raises(torchrepro.SeedingError) as refused:
        torchrepro.stream("augment")

    assert str(refused.value).startswith(f"${variable}: {text[:9] or chr(39) * 2}")


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
POLICY = st.sampled_from(["distinct", "same"])


@given(data=st.data(), sizes=SIZES)
def test_ranks_of_a_mesh_agree_along_same_dimensions_only(
    data: st.DataObject, sizes: list[int]
) -> None:
    """Two ranks have one number if they differ only along dimensions with the policy `same`."""
    pool = ["dp", "pp", "ep", "tp", "sp", "cp"]
    order = data.draw(st.permutations(pool))
    names = tuple(order[: len(sizes)])
    policy = data.draw(
        st.dictionaries(st.sampled_from(names), POLICY) | st.sampled_from(["distinct", None])
    )
    positions = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    one, other = (Mesh(names, tuple(sizes), data.draw(positions)) for _ in "ab")
    plans = [SeedPlan(ranks=policy, mesh=mesh) for mesh in (one, other)]

    def differs(name: str) -> bool:
        named = policy.get(name) if isinstance(policy, dict) else None
        return named == "distinct" if named else name not in AGREEING

    steps = zip(names, one.position, other.position, strict=True)
    apart = any(here != there for name, here, there in steps if differs(name))
    assert (plans[0].coordinate() != plans[1].coordinate()) == apart
    assert plans[0].coordinate("same") == 0


def test_dimensions_without_a_mesh_are_refused(be: Place) -> None:
    """A policy by dimension needs a mesh if there is more than one rank."""
    plan = SeedPlan(ranks={"dp": "same"})

    assert plan.coordinate() == 0
    be(0, 2)
    with pytest.raises(torchrepro.SeedingError, match="use_mesh"):
        plan.coordinate()


def _global_numbers() -> tuple[Any, ...]:
    return random.random(), np.random.random_sample(), torch.rand(()).item()


def _numbers_under(profile: dict[str, Any]) -> tuple[Any, ...]:
    with torchrepro.apply(profile):
        return _global_numbers()


def test_distinct_ranks_start_from_different_seeds(
    be: Place, generators: Callable[[], Any]
) -> None:
    """Under `ranks: distinct` rank 0 draws as a run without ranks, other ranks differently."""
    before = generators()
    plain, distinct = {"seed": 7}, {"seed": 7, "ranks": "distinct"}
    alone, drawn = _numbers_under(plain), []
    for rank in range(4):
        be(rank, 4)
        drawn.append(_numbers_under(distinct))
        assert _numbers_under({"seed": 7, "ranks": "same"}) == alone
        assert _numbers_under(plain) == alone
        assert generators() == before

    assert drawn[0] == alone
    for numbers in zip(*drawn, strict=True):
        assert len(set(map(str, numbers))) == 4


LATE = """
import json, random, numpy as np, torch, torch.distributed as dist, torchrepro
from torch.testing._internal.distributed.fake_pg import FakeStore

with torchrepro.apply({"seed": 1, "ranks": "distinct"}):
    random.seed(3)
    stream = torchrepro.stream("a") == torchrepro.stream("a", rank=1)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    drawn = [random.random(), np.random.random_sample(), torch.rand(()).item()]
    print(json.dumps([drawn, stream, torchrepro.stream("a") == torchrepro.stream("a", rank=5)]))
"""


def test_a_process_group_overrides_the_variables(forked_answer_of: Callable[..., Any]) -> None:
    """Once it is made, streams and generators are those of its rank.

    A generator that the program has seeded continues unchanged.
    """
    _, of_numpy, of_torch = _numbers_under({"seed": seed_of_rank(1, 5)})

    found = forked_answer_of(LATE, RANK="1", WORLD_SIZE="2")

    assert found == [[random.Random(3).random(), of_numpy, of_torch], True, True]


def _put_python(seed: int) -> Any:
    unknown = random.Random(seed)
    unknown.random()
    random.setstate(unknown.getstate())


def _put_numpy(seed: int) -> Any:
    unknown = np.random.RandomState(seed)
    unknown.random()
    np.random.set_state(unknown.get_state())


def _put_numpy_under_another_profile() -> Any:
    with torchrepro.apply({"seed": 2}):
        _put_numpy(3)


def _reads_an_unknown_state() -> None:
    _put_python(3)
    state = random.getstate()
    random.seed(1)
    random.setstate(state)


MOVES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "nothing": (lambda: None, set()),
    "unknown states": (lambda: (_put_python(3), _put_numpy(3)), {"python", "numpy"}),
    "before another profile": (
        lambda: (_put_python(3), _put_numpy_under_another_profile()),
        {"python"},
    ),
    "the profile's own seed after it": (lambda: (_put_python(3), random.seed(1)), set()),
    "the profile's own state after it": (
        lambda: (_put_python(3), random.setstate(random.Random(1).getstate())),
        set(),
    ),
    "an unknown state that was read": (_reads_an_unknown_state, {"python"}),
    "an unknown state for a while": (torchrepro.isolated_rng()(lambda: _put_python(3)), set()),
    "a state of the profile": (lambda: random.setstate(random.getstate()), set()),
    "torch's generator of the CPU": (lambda: torch.default_generator.manual_seed(3), {"torch"}),
}
"""Calls of a program before it knows its rank, and the generators that they have set."""


@pytest.mark.parametrize("move", MOVES)
def test_a_late_rank_seeds_only_untouched_generators(move: str, be: Place) -> None:
    """Generators that the program has not set since the profile start from the rank's seed."""
    moves, moved = MOVES[move]
    own = seed_of_rank(1, 5)
    random.seed(own), np.random.seed(own), torch.manual_seed(own)
    of_rank = _global_numbers()
    with torchrepro.apply({"seed": 1, "ranks": "distinct"}):
        moves()
        be(5, 8)
        seed_as_this_rank()
        drawn = zip(("python", "numpy", "torch"), _global_numbers(), of_rank, strict=True)

    assert {name for name, number, other in drawn if number != other} == moved


@pytest.mark.parametrize("ranks", [None, "distinct"])
def test_ranks_can_share_initial_weights_and_differ_in_augmentation(
    ranks: str | None, be: Place
) -> None:
    """`seeded("init", ranks="same")` draws the same on every rank, a stream differs on each."""
    weights, augment, usual = [], [], []
    for rank in range(4):
        be(rank, 4)
        with torchrepro.apply({"seed": 7} | ({"ranks": ranks} if ranks else {})):
            with torchrepro.seeded("init", ranks="same"):
                weights.append(str(_global_numbers()))
            with torchrepro.seeded("init"):
                usual.append(str(_global_numbers()))
            augment.append(torchrepro.stream("augment").seed)

    assert len(set(weights)) == 1
    assert len(set(usual)) == len(set(augment)) == 4


def test_under_same_every_rank_draws_as_rank_0(be: Place) -> None:
    """Streams agree under `ranks: same`, unless a scope or an argument sets another policy."""
    with torchrepro.apply({"seed": 7, "ranks": "same"}):
        first = torchrepro.stream("augment")
        be(3, 4)
        assert torchrepro.stream("augment") == first
        assert torchrepro.stream("augment", rank=3) != first
        with torchrepro.seeded("augment", ranks="distinct") as source:
            assert source == torchrepro.stream("augment", rank=3)


@pytest.mark.parametrize("policy", ["distnict", "", 1, True, ["same"], {"dp": "distnict"}])
def test_an_unknown_policy_is_refused(
    policy: Any, seed_1234: Any, generators: Callable[[], Any]
) -> None:
    """The message names the policies and a near match, and nothing changes."""
    before = generators()

    with pytest.raises(torchrepro.SeedingError) as refused, torchrepro.seeded("init", policy):
        pass

    assert "legal: distinct, same" in str(refused.value)
    assert ("did you mean: distinct" in str(refused.value)) == ("distnict" in str(policy))
    assert before == generators()


NAMES = ("dp", "tp", "pp")
START = """
import json, random, sys
import numpy as np, torch, torch.distributed as dist, torchrepro
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

def on_every_rank(size, work):
    answers = []
    for rank in range(size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        answers.append(work())
        dist.destroy_process_group()
    return answers

def draws():
    return [random.random(), np.random.random_sample(), torch.rand(()).item()]
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
SHAPES = [(2, 2, 1), (1, 4, 1), (3, 2, 2)]  # of any shape: above


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


def test_ranks_differ_along_the_distinct_dimensions_of_the_profile(
    forked_answer_of: Callable[..., Any],
) -> None:
    """By default data-parallel ranks differ pairwise and tensor-parallel ranks agree.

    The first rank along all distinct dimensions draws as a run without ranks.
    """
    alone = [*_numbers_under({"seed": 1234})]
    profiles = [{"seed": 1234} | ({"ranks": ranks} if ranks else {}) for ranks, *_ in POLICIES]

    answers = forked_answer_of(START + PLACES, json.dumps([profiles, SHAPES]))

    for (_, globals_along, streams_along), of_profile in zip(POLICIES, answers, strict=True):
        for shape, of_ranks in zip(SHAPES, of_profile, strict=True):
            drawn, streams, usual, same, turned = zip(*of_ranks, strict=True)
            assert not globals_along or drawn[0] == alone
            _groups(shape, drawn, globals_along)
            _groups(shape, streams, streams_along)
            _groups(shape, usual, streams_along)
            _groups(shape, same, "")
            _groups(shape, turned, "tp")


def test_a_mesh_is_forgotten_with_the_profile(forked_answer_of: Callable[..., Any]) -> None:
    """Undo forgets the mesh and restores the generators; an inner profile keeps the mesh."""
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
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
named = {"mesh_dim_names": ("dp", "tp")}
answers = []
for ranks, mesh in (
    ("distinct", init_device_mesh("cpu", (2, 2))),
    ("distinct", DeviceMesh("cpu", [[0, 1]], **named)),
    ({"dpp": "same"}, init_device_mesh("cpu", (2, 2), **named)),
):
    with torchrepro.apply({"seed": 5, "ranks": ranks}):
        before = random.getstate(), torch.get_rng_state().tolist(), streams.current_plan()
        try:
            torchrepro.use_mesh(mesh)
        except torchrepro.SeedingError as error:
            after = random.getstate(), torch.get_rng_state().tolist(), streams.current_plan()
            answers.append([str(error), before == after])
print(json.dumps(answers))
"""
WORDS = [
    ("has no names", "mesh_dim_names"),
    ("does not contain this rank",),
    ("ranks.dpp", "legal: dp, tp", "did you mean: dp"),
]


def test_an_incomplete_mesh_is_refused(forked_answer_of: Callable[..., Any]) -> None:
    """The message says what the mesh lacks, and nothing changes."""
    for (refused, unchanged), words in zip(forked_answer_of(START + BAD), WORDS, strict=True):
        assert [word for word in words if word not in refused] == []
        assert unchanged


@pytest.mark.parametrize("given", [None, 3, [[0, 1]]])
@pytest.mark.parametrize("profile", [{}, {"seed": 5}])
def test_use_mesh_refuses_other_objects(given: Any, profile: Any) -> None:
    """It raises `SeedingError`, with and without a profile."""
    refused = pytest.raises(torchrepro.SeedingError, match="not a device mesh")
    with torchrepro.apply(profile), refused:
        torchrepro.use_mesh(given)
