"""Laws of the terminal's answer and of the JSON: short, plain, complete."""

import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.console import as_text, height
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.diagnosis import advice, levels_above, next_level
from torchrepro.verdict.page import page
from torchrepro.verdict.render import headline, size, source_line, verdict_json, verdict_parts
from torchrepro.verdict.value import (
    Compared,
    Distance,
    Divergence,
    Element,
    Kind,
    Setting,
    Verdict,
)
from torchrepro.verification.perturbations import PERTURBATIONS
from torchrepro.verification.result import (
    EscalationTrial,
    Run,
    StressResult,
    Verification,
    verification_parts,
)

from .test_diagnosis import CASES
from .verdicts import divergence, equal, parted, side

LONGEST = 25


def told(verdict: Verdict) -> str:
    """Return a verdict as a pipe shows it, with the level that comes next."""
    level = next_level({}) if verdict.first else None
    return as_text(*verdict_parts(verdict, level))


def test_the_same_is_one_line_that_says_how_much_was_compared() -> None:
    """Nothing is to be read where nothing differs."""
    assert told(equal()) == (
        "the same: 2 ranks, 100 steps, 95,300 ops, 118 GB of tensors read, bit for bit"
    )


def test_the_certainty_is_that_of_the_comparison() -> None:
    """A tolerance and a coarser recording are said."""
    tolerant = told(equal(tolerance=(1e-3, 1e-5)))
    coarse = told(equal(compared=Compared(1, 1, 40, 1500, "step")))

    assert "within rtol=0.001, atol=1e-05" in tolerant
    assert "bit for bit" not in tolerant
    assert coarse == (
        "the same: 1 step, 40 records, 1.5 kB of tensors read (recorded at level step), bit for bit"
    )


def test_what_differs_though_the_runs_are_the_same_is_said() -> None:
    """Settings that made no difference, and notes, come below the answer."""
    text = told(
        equal(settings=(Setting("version of torch", None, "2.13.0"),), notes=("B was killed.",))
    )

    assert "version of torch: A not set   B 2.13.0" in text
    assert "B was killed." in text
    assert "digest" not in text


def test_all_that_a_reader_acts_on_is_told_in_a_screen() -> None:
    """Place, op, source, values, spread, cause, knob, level, command; no fingerprints of values."""
    verdict = parted()
    text = told(verdict)

    first = verdict.first
    assert first is not None
    assert first.left is not None
    assert verdict.advice is not None
    for word in (
        *("step 7", "forward", first.module, first.op, first.kind, first.what, first.source),
        *(first.left.outputs, "0.12345678", "0.12345679", "[0, 3, 17]", "1.2e-07", "cosine"),
        *("1,204", "head (12)", verdict.advice.cause, verdict.advice.setting),
        *(verdict.advice.closer, "seeds: seed=1234", verdict.left, verdict.right),
        *("env.OMP_NUM_THREADS", "11,436 ops", "B was killed"),
    ):
        assert word in text
    assert first.left.output_fingerprints[0][:8] not in text
    assert "read  " not in text


def test_fingerprints_are_told_short_where_they_differ_and_no_values_are_known() -> None:
    """A reader compares the first digits of what differs; the JSON has them whole."""
    first = divergence()
    text = told(parted(first))

    assert "A 3f1c0000   B 9a020000" in text
    assert "3f1c0000a" not in text
    assert "3f1c0000aaaabbbb3f1c0000aaaabbbb" in json.dumps(verdict_json(parted(first)))


def test_two_long_texts_are_shown_where_they_differ() -> None:
    """Arguments that begin alike are cut in front of their difference, and told once."""
    left, right = (f"({', '.join(['0.25'] * 90)}, lr={number}, fused=False)" for number in (1, 2))
    first = divergence(
        *("aten::mul", Kind.ARGUMENT),
        what=f"{left} and {right}",
        left=side(argument=left),
        right=side(argument=right),
    )
    (line,) = (line for line in told(parted(first)).splitlines() if "lr=" in line)

    assert "lr=1, fused=False)   B ..." in line
    assert "lr=2, fused=False)" in line


LONG = "/home/somebody/projects/a-model/src/package/training/loop.py"
SETTINGS = tuple(Setting(f"backends.of.some.length{n}", "true", "false") for n in range(9))


def crowded(first: Divergence, settings: tuple[Setting, ...], meta: dict[str, object]) -> Verdict:
    """Return a verdict that has all that a verdict can have, and long names everywhere."""
    sides = (
        one
        and replace(
            one,
            run=f"/tmp/torchrepro-verify-b31d_lx9/{name}",
            argument=one.argument or f"([128, 1024], {name}, device=device(type='cpu'))" * 9,
            outputs=", ".join([one.outputs] * 9),
            input_fingerprints=tuple(f"{name}{number:014x}" for number in range(9)),
        )
        for one, name in ((first.left, "run-1"), (first.right, "run-2"))
    )
    names = ("left", "right")
    where = {"source": f"{LONG}:412", "what": first.what or "input 0 of this op is " * 9}
    more = replace(
        first,
        **where,
        **dict(zip(names, sides, strict=True)),
        elements=(Element("output 0", (0, 3, 17), "0.12345678", "0.12345679"),) * 9,
        distances=(Distance("output 0", 1.2e-7, 3.1e-6, 0.99999999),) * 9,
    )
    verdict = parted(
        more,
        left="/tmp/torchrepro-verify-b31d_lx9/run-1",
        right="/tmp/torchrepro-verify-b31d_lx9/run-2",
        settings=(*settings, *SETTINGS),
        notes=("the states of torch, numpy differ from the end of step 7 on, " * 3,) * 9,
        by_module=tuple((f"encoder.layers.{n}.self_attention", 9000 + n) for n in range(90)),
        independent=77,
        across_ranks=("A: the parameters of ranks 0 and 1 agree at step 1",),
    )
    command = "python src/train.py --config configs/large.yaml --data /data/imagenet --lr 0.1"
    return replace(verdict, advice=advice(verdict, meta, command))


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_fits_on_a_terminal(case: str) -> None:
    """Whatever diverges, and however much is known of it, 25 lines of 80 columns tell it."""
    first, settings, meta, *_ = CASES[case]
    profile = {"profile": "debug-strict", "guarantee": "repeatable"}
    seeded = {"seed": "1", "dataloader": {"seeding": "auto"}, "env": {"PYTHONHASHSEED": "0"}}
    for about, values in (({**meta, **profile}, {}), (meta, seeded)):
        verdict = crowded(first, settings, about)
        parts = verdict_parts(verdict, next_level(values, verdict.first))
        text = as_text(*parts)

        assert height(80, *parts) <= LONGEST
        assert verdict.advice is not None
        for word in (verdict.advice.setting, first.op, f"{LONG}:412" if first.op else ""):
            assert word in text


@pytest.mark.parametrize("case", ["dropout", "argument", "generator"])
@pytest.mark.parametrize("equal", [True, False])
def test_a_verification_fits_on_a_terminal(case: str, *, equal: bool) -> None:
    """Perturbations and levels that were tried are told in the same 25 lines."""
    first, settings, meta, *_ = CASES[case]
    verdict = crowded(first, settings, meta)
    levels = list(levels_above({}, first))
    found = Verification(
        asked="bits",
        certifies="torchrepro run debug-strict -- python train.py --lr 0.1 --data /data/imagenet",
        profile="debug-strict",
        own_profile=None,
        runs=tuple(Run(f"run-{n}", "out", "log", 0, 1.0, 12, recorded=True) for n in (1, 2)),
        verdicts=(verdict,),
        folder="/tmp/torchrepro-verify-b31d_lx9",
        stressed=StressResult(
            tuple(row.name for row in PERTURBATIONS),
            (("hash seed", "the profile sets PYTHONHASHSEED"), ("affinity", "there is one CPU")),
        ),
        escalation=tuple(
            EscalationTrial(level, equal and level is levels[-1], headline(verdict))
            for level in levels
        ),
    )

    assert height(80, *verification_parts(found)) <= LONGEST
    text = as_text(*verification_parts(found))
    assert all(override in text for override in levels[-1].overrides if equal)
    assert headline(verdict) in text


def test_an_op_that_one_run_lacks_is_told_with_the_run_that_has_it() -> None:
    """Nothing is compared with what is not there."""
    text = told(parted(divergence(kind=Kind.ONLY_ONE, left=None)))

    assert "only in       B" in text
    assert "wrote" not in text


def test_a_run_that_ended_earlier_is_told_as_such() -> None:
    """No op is blamed where one run has no more of them."""
    first = divergence("", Kind.ENDED, what="B has 7 steps, A 12.", left=None, right=None)
    text = told(parted(first))

    assert text.splitlines()[0].startswith("not the same: one run ended earlier, at step 7")
    assert "B has 7 steps" in text
    assert "afterwards" not in text


def test_what_follows_a_difference_is_counted_in_good_english() -> None:
    """One record passes it on, several pass it on."""
    assert "1 record only passes it on" in told(parted(propagated=1))
    assert "1,204 records only pass it on" in told(parted())


def test_memory_that_nothing_wrote_is_not_shown_as_a_fingerprint() -> None:
    """What stands for it in a recording means nothing to a reader."""
    empty = UNINITIALISED.hex()
    first = divergence(left=side(input_fingerprints=(empty,)))
    text = told(parted(first)) + page(parted(first))

    assert text.count("(never written)") == 2
    assert empty not in text


@given(text=st.text(alphabet=st.characters(min_codepoint=0, max_codepoint=0x2FFF)))
def test_no_name_from_a_recording_steers_the_terminal(text: str) -> None:
    """Control characters and marks of direction are written out, wherever they come from."""
    first = divergence(
        text, module=text, source=text, what=text, thread=text, left=side(outputs=text)
    )
    shown = told(parted(first, settings=(Setting(text, text, None),), notes=(text,), left=text))

    assert all(line.isprintable() for line in shown.split("\n"))


def test_the_line_of_the_source_is_shown_if_it_can_be_read() -> None:
    """A line of this very file is found, one of a file that is gone is not."""
    assert source_line(f"{__file__}:1").startswith('"""Laws of the terminal')
    assert [source_line(each) for each in ("gone.py:3", "gone.py", "", ":1", "a:x")] == [""] * 5


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**12, "2 TB")]
)
def test_sizes_are_readable(number: int, text: str) -> None:
    """Bytes are told in the unit that leaves few digits."""
    assert size(number) == text


def test_a_verdict_is_shown_the_same_wherever_it_comes_from() -> None:
    """A process that only unpickles a verdict shows it as the one that made it does."""
    verdict = parted()
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(verdict), capture_output=True, check=True
    )

    assert done.stdout.decode().rstrip("\n") == str(verdict).rstrip("\n")


def test_the_json_is_valid_and_has_the_documented_keys() -> None:
    """A verdict goes through JSON; of the map it keeps what differs."""
    verdict = parted()
    found = json.loads(json.dumps(verdict_json(verdict, next_level({}, verdict.first))))

    assert found["same"] is False
    keys = {"rank", "step", "phase", "module", "op", "source", "kind", "left", "right", "elements"}
    assert keys <= set(found["first"])
    assert found["first"]["kind"] == "equal inputs, unequal outputs"
    assert found["compared"]["ops"] == 11436
    assert found["advice"]["setting"] == "backends.cpu.num_threads=1"
    assert found["next_level"]["name"] == "deterministic kernels"
    assert found["map"]
    assert all(cell["differing"] for cell in found["map"])
    assert verdict_json(equal())["first"] is None


@given(losses=st.lists(st.tuples(st.integers(0, 9), st.floats(), st.none() | st.floats())))
def test_no_number_breaks_the_json(losses: list[tuple[int, float, float | None]]) -> None:
    """NaN and infinities, which JSON does not have, are text; every other number is itself."""
    verdict = equal(losses=tuple(losses))
    text = json.dumps(verdict.to_json(), allow_nan=False)

    assert verdict_json(verdict) == {**verdict.to_json(), "next_level": None}
    for (_, left, _), (_, again, _) in zip(losses, json.loads(text)["losses"], strict=True):
        assert again == (left if math.isfinite(left) else str(left))


def test_a_place_names_its_rank_only_where_it_is_not_the_first() -> None:
    """One process needs no rank."""
    places: list[Divergence] = [divergence(), divergence(rank=3)]
    first, other = (told(parted(each)).splitlines()[0] for each in places)

    assert "rank" not in first
    assert "on rank 3" in other
