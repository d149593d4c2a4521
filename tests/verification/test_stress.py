"""Perturbed runs: a condition that results must not depend on is found and named."""

from __future__ import annotations

import pytest

from torchrepro.ground.errors import ProfileError
from torchrepro.profile.load import resolve
from torchrepro.verification.perturbations import EVERYTHING, PERTURBATIONS, StressPlan
from torchrepro.verification.result import verification_json

OF_HASHES = "batch[0, 0] = [*{'the', 'cat', 'sat', 'on', 'mat'}].index('cat')"
DEPENDENT = {
    "memory contents": "batch[0] = torch.empty(1 << 24)[:4].nan_to_num(0, 0, 0)",
    "clock": "batch[0, 0] = __import__('time').time() > os.path.getmtime('train.py') + 90_000",
    "time zone": "batch[0, 0] = __import__('time').localtime().tm_gmtoff",
    "file order": "batch[0, 0] = ord(os.listdir()[0][0])",
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [pytest.param("memory contents", marks=pytest.mark.slow), *[*DEPENDENT][1:]]
)
def test_the_condition_that_a_program_depends_on_is_named(name, training, verified, request):
    """A program whose unperturbed runs agree diverges under stress, and the cause is named."""
    if name != "memory contents":  # before Python starts
        request.getfixturevalue("forked")
    command = training(DEPENDENT[name], "import os")
    verification = verified(command, stress=[name, "affinity"], closer=False)

    assert not verification.same
    assert verification.stressed.culprits == (name,)
    assert name in verification.verdict.notes[0]
    assert {"file order": "order of files"}.get(name, name) in verification.verdict.advice.cause
    assert verification_json(verification)["stress"]["culprits"] == [name]


@pytest.mark.usefixtures("forked")
def test_no_perturbation_is_blamed_if_unperturbed_runs_diverge(training, verified):
    """A note says so, and that no run has a hash seed that differs from the profile's."""
    line = "batch[0, 0] = __import__('random').SystemRandom().random()"
    asked = {"overrides": ['env.PYTHONHASHSEED="0"'], "stress": EVERYTHING}
    verification = verified(training(line), closer=False, **asked)

    assert not verification.same
    assert verification.stressed.culprits == ()
    assert "without any perturbation" in verification.verdict.notes[0]
    assert len(verification.runs) == 2
    assert dict(verification.stressed.skipped)["hash seed"].startswith("the profile sets it")


@pytest.mark.parametrize("seed", ["0", "7919", "4294967295"])
def test_variables_that_the_profile_sets_are_not_perturbed(seed):
    """The perturbation is skipped, with the reason. Only the hash seed gets one more run, with a
    seed that differs from the profile's.
    """
    profile = resolve("seed-only", ["env_extra.TZ=UTC", f'env.PYTHONHASHSEED="{seed}"'])
    plan = StressPlan.of(EVERYTHING, profile)

    assert dict(plan.skipped)["time zone"] == "the profile sets TZ"
    assert plan.other_hash_seed not in ("", seed)
    assert "PYTHONHASHSEED" not in plan.environment(1, plan.names).variables
    assert {*plan.names, *dict(plan.skipped), "hash seed"} == set(EVERYTHING)


@pytest.mark.slow
def test_a_command_that_fixes_the_hash_seed_is_proposed_once_its_runs_agree(training, verified):
    """If the hash seed alone makes runs differ, the proposed command was tried."""
    verification = verified(training(OF_HASHES), stress=["hash seed", "affinity"])

    assert verification.stressed.culprits == ("hash seed",)
    assert "depends on the order of a set of strings" in verification.verdict.advice.cause
    assert "env.PYTHONHASHSEED" in verification.verdict.advice.command
    assert verification.verdict.advice.tried == "the same in 3 runs"
    assert [trial.same for trial in verification.tried] == [True]


@pytest.mark.slow
def test_a_hash_seed_that_the_profile_sets_is_perturbed_in_a_separate_run(training, verified):
    """If only another hash seed makes runs diverge, the answer says so, with advice; a program that
    does not depend on it is the same, and the hash seed counts as perturbed.
    """
    set_it = {"overrides": ['env.PYTHONHASHSEED="0"'], "stress": ["hash seed"], "closer": False}
    verification = verified(training(OF_HASHES), **set_it)
    other = verified(training(), **set_it | {"folder": ""})

    assert not verification.same
    assert [verdict.same for verdict in verification.verdicts] == [True, False]
    assert verification.stressed.culprits == verification.runs[-1].perturbed == ("hash seed",)
    assert "`+repro=` alone does not" in verification.stressed.what
    assert verification.verdict.notes[0] == verification.stressed.what
    assert "hash seed" in verification.verdict.advice.cause
    assert verification_json(verification)["stress"]["culprits"] == ["hash seed"]
    assert other.same
    assert other.stressed.perturbed == ("hash seed",)
    assert (other.stressed.culprits, other.stressed.skipped) == ((), ())


def test_an_unknown_perturbation_is_refused_with_a_near_match():
    """The error names a similar perturbation."""
    with pytest.raises(ProfileError, match="hash seed"):
        StressPlan.of(["hash sed"], resolve("seed-only"))


@pytest.mark.parametrize("row", PERTURBATIONS, ids=lambda row: row.name)
def test_a_perturbation_acts_alone(row):
    """Each perturbation has an effect that no other one has."""
    plan = StressPlan(PERTURBATIONS)
    others = [name for name in plan.names if name != row.name]
    without, alone = plan.environment(1, others), plan.environment(1, [row.name])
    everything = plan.environment(1, plan.names)

    assert without != everything != alone
    assert alone | without != alone
    assert {**without.in_process, **alone.in_process} == everything.in_process
    for name in row.variables(1):
        assert without.variables.get(name) == row.unperturbed.get(name)


@pytest.mark.usefixtures("forked")
def test_perturbations_that_act_together_are_named_together(training, verified):
    """If none is enough alone, the answer names several of them."""
    moved = "time.time() > os.path.getmtime('train.py') + 90_000"
    line = f"batch[0, 0] = sys.getswitchinterval() < 1e-4 and {moved}"
    together = ("clock", "thread scheduling")
    verification = verified(training(line, "import os, sys, time"), stress=together, closer=False)

    assert verification.stressed.culprits == together
    assert "several perturbations together" in verification.verdict.notes[0]
