"""Settings that never reach an NPU are detected from the answers of torch_npu."""

import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from torchrepro.doctor import examine
from torchrepro.knobs import ascend, torch_state
from torchrepro.profile.load import resolve

Has = Callable[..., None]
MATMUL = ascend.MatmulHf32("ALLOW_MATMUL_HF32", {})


@pytest.fixture
def has_npu(monkeypatch: pytest.MonkeyPatch) -> Has:
    """Put a placeholder for torch_npu with these answers into this process."""

    def has_npu(
        *, cann: str = "9.2.0", devices: int = 2, used: bool = False, queue: int = 1, **options: str
    ) -> None:
        texts = defaultdict(str, options)
        native = ModuleType("torch_npu")
        native._C = SimpleNamespace(_npu_getOption=lambda name: texts[name].encode())
        npu = SimpleNamespace(
            is_available=lambda: devices > 0,
            is_initialized=lambda: used,
            is_jit_compile_false=lambda: texts["jitCompile"] != "enable",
            get_task_queue_enable=lambda: queue,
            set_option=texts.update,
            utils=SimpleNamespace(get_cann_version=lambda part: cann if part == "RUNTIME" else ""),
            _sync_deterministic_level=lambda level: level,
        )
        monkeypatch.setitem(sys.modules, "torch_npu", native)
        monkeypatch.setattr(torch, "npu", npu, raising=False)
        for name in ("TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING"):
            monkeypatch.delenv(name, raising=False)

    return has_npu


@pytest.mark.parametrize(
    ("cann", "heard"),
    [
        *(("8.3.0", False), ("8.4.9", False), ("8.0.RC3", False), ("7.0.1", False)),
        *(("8.5.0", True), ("8.5.0.alpha001", True), ("9.0.0", True), ("10.1.0", True)),
        ("", True),
    ],
)
def test_determinism_is_blocked_below_cann_8_5(has_npu: Has, cann: str, heard: bool) -> None:
    """Exactly the known runtimes below 8.5 block determinism on the NPU.

    A torch_npu older than level 3 forwards it to every runtime.
    """
    has_npu(cann=cann)

    assert (torch_state.determinism_blocked({}) == "") == heard
    del torch.npu._sync_deterministic_level
    assert torch_state.determinism_blocked({}) == ""


def test_without_a_device_nothing_is_blocked(has_npu: Has) -> None:
    """A machine without an NPU computes on the CPU, where the flag of torch works."""
    has_npu(cann="8.3.0", devices=0)

    assert torch_state.determinism_blocked({}) == ""
    assert "8.3" in torch_state.cann_too_old()


JIT = "backends.npu.jit_compile"
QUEUE = "backends.npu.task_queue"


@pytest.mark.parametrize(
    ("answers", "asked", "heard"),
    [
        ({}, {}, True),
        ({"jitCompile": "enable"}, {}, False),
        ({"jitCompile": "enable", "used": True}, {}, False),
        ({"jitCompile": "enable", "used": True, "queue": 0}, {}, True),
        ({"jitCompile": "enable"}, {JIT: False}, True),
        ({}, {JIT: True}, False),
        ({}, {JIT: True, QUEUE: 0}, True),
        ({"queue": 0}, {JIT: True, QUEUE: 1}, False),
        ({}, {JIT: True, "env.TASK_QUEUE_ENABLE": "0"}, True),
        ({"used": True}, {JIT: True, "env.TASK_QUEUE_ENABLE": "0"}, False),
        ({}, {JIT: True, "env.ASCEND_LAUNCH_BLOCKING": "1"}, True),
        ({}, {JIT: True, "env.ASCEND_LAUNCH_BLOCKING": "0"}, False),
    ],
)
def test_compiled_ops_behind_the_queue_are_blocked(
    has_npu: Has, answers: dict[str, Any], asked: dict[str, Any], heard: bool
) -> None:
    """The profile comes first, then the settings in use, then the variables."""
    has_npu(**answers)

    assert (torch_state.determinism_blocked(asked) == "") == heard


@pytest.mark.parametrize(
    ("set_before", "asked", "allow", "decides"),
    [
        ("", None, False, True),
        ("0", None, False, True),
        ("4", None, False, True),
        ("3", None, False, False),
        ("1", None, False, False),
        ("3", None, True, True),
        ("0", None, True, False),
        ("3", "KEEP_DTYPE", False, True),
        ("", "USE_HF32", False, False),
    ],
)
def test_cube_math_type_overrides_the_hf32_switch(
    has_npu: Has, set_before: str, asked: str | None, allow: bool, decides: bool
) -> None:
    """The switch has no effect exactly if cube_math_type requires the opposite."""
    has_npu(CUBE_MATH_TYPE=set_before)
    wanted = {} if asked is None else {"backends.npu.cube_math_type": asked}

    assert (MATMUL.inert(allow, wanted) == "") == decides


def test_another_backend_called_npu_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch.npu that has devices but no settings makes no knob ineffective."""
    npu = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, "npu", npu, raising=False)

    assert torch_state.determinism_blocked({}) == ""
    assert MATMUL.inert(False, {}) == ""


@pytest.mark.parametrize("devices", [0, 2])
@pytest.mark.parametrize(
    ("cann", "overrides", "words"),
    [
        ("8.3.0", [], ["below 8.5"]),
        ("9.2.0", ["backends.npu.jit_compile=true"], ["jit_compile on"]),
        ("8.3.0", ["backends.npu.jit_compile=true"], ["below 8.5"]),
        ("9.2.0", [], []),
    ],
)
def test_doctor_reports_each_blocked_setting_once(
    has_npu: Has, devices: int, cann: str, overrides: list[str], words: list[str]
) -> None:
    """doctor has one serious finding per reason, and reports if torch_npu finds no device."""
    has_npu(cann=cann, devices=devices)
    found = [finding.what for finding in examine(resolve("debug-strict", overrides))]
    about = [what for what in found if "determinism" in what]

    assert [word for word, what in zip(words, about, strict=True) if word in what] == words
    assert any("finds no NPU" in what for what in found) == (devices == 0)
