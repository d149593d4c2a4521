"""Where the NPU does not hear of a setting, the report and doctor say so; see test_reaches_cann.

TORCHREPRO_ASCEND_RIG=~/ascend-rig python -m pytest tests/ascend
"""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.npu, pytest.mark.slow]

OLD, NEW = "8.3.0", "9.2.0"
ALGORITHMS = "backends.torch.deterministic_algorithms"


def told(ran: Any) -> str:
    """Return the calls that tell CANN to be deterministic, and nothing else."""
    calls = [call for lines in ran.calls.values() for call in lines]
    return " ".join(call for call in calls if call.endswith(("SysParamOpt 0 1", "Config 0 1")))


STRICT = """
torch.npu.init()
try:
    torchrepro.apply({profile!r})
except torchrepro.ApplyError as error:
    say([error.exit_status, str(error)])
say([torch.are_deterministic_algorithms_enabled(), torch.npu.conv.allow_hf32])
torch.ones(1, device="npu")
"""


@pytest.mark.parametrize("profile", ["debug-strict", "npu-align"])
def test_a_strict_profile_stops_where_cann_is_too_old(rig: Any, profile: str) -> None:
    """Below CANN 8.5 no NPU can be made deterministic: what promises it stops, and undoes."""
    ran = rig.run(STRICT.format(profile=profile), cann=OLD)
    assert ran.status == 0, ran.stderr
    status, message = ran.said[0]

    assert status == 3
    assert f"{ALGORITHMS}: ineffective: CANN runtime 8.3" in message
    assert ran.said[1] == [False, True]
    assert told(ran) == ""


def test_run_ends_with_status_3_where_cann_is_too_old(rig: Any) -> None:
    """`torchrepro run` stops a program when it loads torch, before its first op."""
    program = ("--", str(rig.folder / "venv/bin/python"), "-c", "import torch; print('went on')")
    ran = rig.command("run", "debug-strict", *program, cann=OLD)

    assert ran.status == 3
    assert "below 8.5" in ran.stderr


LENIENT = """
profile = {"backends": {"torch": {"deterministic_algorithms": "error"}}}
planned = torchrepro.plan(profile).report
with torchrepro.apply(profile) as applied:
    knob = "backends.torch.deterministic_algorithms"
    say([str(report[knob].outcome) for report in (planned, applied.report)])
    torch.ones(2, device="npu")
    mark("end")
"""


@pytest.mark.parametrize(
    ("cann", "devices", "outcome"),
    [(OLD, 2, "ineffective"), (OLD, 0, "applied"), (NEW, 2, "applied")],
)
def test_an_old_cann_is_ineffective_only_where_there_is_a_device(
    rig: Any, cann: str, devices: int, outcome: str
) -> None:
    """Plan and report agree; with no NPU in the process torch's flag acts on all there is."""
    program = LENIENT if devices else LENIENT.replace('torch.ones(2, device="npu")', "")
    ran = rig.run(program, cann=cann, devices=devices)
    assert ran.status == 0, ran.stderr

    assert ran.said == [[outcome, outcome]]
    assert bool(told(ran)) == (outcome == "applied" and devices > 0)


COMPILED = """
x = torch.ones(2, device="npu")
x.cpu()  # with its first tensor a process forwards determinism, whatever the mode
npu = {npu!r}
algorithms = {{"deterministic_algorithms": "error"}}
with torchrepro.apply({{"backends": {{"torch": algorithms, "npu": npu}}}}) as applied:
    say(str(applied.report["backends.torch.deterministic_algorithms"].outcome))
    x * x
    mark("end")
"""


@pytest.mark.parametrize(
    ("npu", "variables", "outcome"),
    [
        ({"jit_compile": True}, {}, "ineffective"),
        ({"jit_compile": True}, {"TASK_QUEUE_ENABLE": "0"}, "applied"),
        ({"jit_compile": True}, {"ASCEND_LAUNCH_BLOCKING": "1"}, "applied"),
        ({"jit_compile": True, "task_queue": 0}, {}, "applied"),
        ({"jit_compile": False}, {}, "applied"),
    ],
)
def test_compiled_ops_behind_the_queue_are_ineffective(
    rig: Any, npu: dict[str, Any], variables: dict[str, str], outcome: str
) -> None:
    """Determinism is called applied exactly where a compiled op forwards it to CANN."""
    ran = rig.run(COMPILED.format(npu=npu), **variables)
    assert ran.status == 0, ran.stderr

    assert ran.said == [outcome]
    assert bool(told(ran)) == (outcome == "applied")


CUBE = """
torch.npu.matmul.cube_math_type = torch.npu.CubeMathType.USE_HF32
with torchrepro.apply({"backends": {"npu": {"matmul_allow_hf32": False}}}) as applied:
    say(str(applied.report["backends.npu.matmul_allow_hf32"].outcome))
    x = torch.ones(2, 2, device="npu")
    x @ x
    mark("end")
"""


def test_an_hf32_switch_that_loses_is_ineffective(rig: Any) -> None:
    """Where the program has set cube_math_type, the older switch decides nothing."""
    ran = rig.run(CUBE)

    assert ran.said == ["ineffective"], ran.stderr
    assert "0 aclnnMatmul.cube_math_type 3" in [c for calls in ran.calls.values() for c in calls]


NO_DEVICE = """
waiting = len(torch.npu._queued_calls)
with torchrepro.apply("npu-align") as applied:
    say(str(applied.report["seed.npu"].outcome))
    state = torchrepro.rng_state()
    torchrepro.set_rng_state(state)
    with torchrepro.isolated_rng(), torchrepro.seeded("a"):
        torch.rand(1)
say([len(torch.npu._queued_calls) - waiting, torch.npu.is_initialized()])
try:
    torch.npu.initial_seed()
except RuntimeError as error:
    say("aclInit" in str(error))
"""


def test_without_a_device_nothing_of_ours_raises(rig: Any) -> None:
    """Seeding, snapshots and undo ask no NPU that is not there, although torch_npu's own raise."""
    ran = rig.run(NO_DEVICE, devices=0)
    assert ran.status == 0, ran.stderr

    assert ran.said == ["unsupported", [0, False], True]


VARIABLES = """
from torchrepro.knobs.variables import ENV
from torchrepro.reporting.process_state import closed_latches
say([[knob.variable, knob.door, knob.door in closed_latches()] for knob in ENV
     if knob.door in ("npu", "torch_npu")])
mark("loaded"); torch.npu.init()
mark("used")
for device in ("npu:0", "npu:1"):
    x = torch.ones(2, 2, device=device)
    (x @ x + torch.rand(2, 2, device=device)).cpu()
mark("end")
"""


def test_variables_are_read_no_earlier_than_their_phase_says(rig: Any) -> None:
    """Until the door of a variable closes no C code has asked for it, so `applied` is true."""
    ran = rig.run(VARIABLES, **rig.asking_recorded)
    assert ran.status == 0, ran.stderr
    at_import, known = ran.variables[""], set().union(*ran.variables.values())
    doors = {name: door for name, door, _ in ran.said[0]}

    assert {name for name, door in doors.items() if door == "npu"} & at_import == set()
    assert {"TORCH_NPU_USE_COMPATIBLE_IMPL"} <= at_import
    assert {"TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING", "INF_NAN_MODE_ENABLE"} <= known
    assert [name for name, door, closed in ran.said[0] if closed != (door == "torch_npu")] == []


LATE = """
if {used}:
    torch.ones(1, device="npu").cpu()
variables = {{"TASK_QUEUE_ENABLE": "0", "TORCH_NPU_USE_COMPATIBLE_IMPL": "1"}}
with torchrepro.apply({{"env": variables}}) as applied:
    say([str(row.outcome) for row in applied.report])
    say([torch.npu.get_task_queue_enable(), torch.npu.are_compatible_impl_enabled()])
"""


@pytest.mark.parametrize(
    ("used", "outcomes", "holds"),
    [
        (False, ["applied", "too_late"], [0, False]),
        (True, ["too_late", "too_late"], [1, False]),
    ],
)
def test_a_variable_that_torch_npu_has_read_is_too_late(
    rig: Any, used: bool, outcomes: list[str], holds: list[Any]
) -> None:
    """What is called applied torch_npu acts on, and what is called too late it ignores."""
    ran = rig.run(LATE.format(used=used))

    assert ran.said == [outcomes, holds], ran.stderr


@pytest.mark.parametrize(("devices", "no_device"), [(0, 1), (2, 0)])
def test_doctor_names_the_traps_of_torch_npu(rig: Any, devices: int, no_device: int) -> None:
    """doctor says that a waiting seed can fail for good, and that there is no NPU, as it is."""
    ran = rig.command("doctor", "npu-align", "--json", devices=devices)
    what = [found["what"] for found in json.loads("\n".join(ran.printed))["findings"]]

    assert ran.status == 0, ran.stderr
    assert sum("NameError" in words for words in what) == 1
    assert sum("finds no NPU" in words for words in what) == no_device
