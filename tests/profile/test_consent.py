"""A profile sets harmless variables without consent, others with consent, dangerous ones never."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import torchrepro
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.variables import allowed, refusal
from torchrepro.profile.schema import VARIABLE

UNKNOWN = "env_extra: {ACME_FLAG: '7'}\n"
RUNS_CODE = {
    "a function by its name": ("TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN", "evil_code.function"),
    "a compiler": ("TORCH_COMPILE_OVERRIDE_INDUCTOR_CONFIGS", "0-99:cpp.cxx=/tmp/evil"),
    "consent itself": (VARIABLE, "ACME_FLAG"),
}
OF_THE_TRIAL = ("a function by its name", "a compiler")  # asked for by every door
COMMANDS = ("show", "plan", "env", "doctor", "lock", "run", "verify", "diff")
TYPED = ("env_extra.ACME_FLAG=8", "env_extra={ACME_FLAG: 8}")


@pytest.fixture(autouse=True)
def _without_consent(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def write(write, tmp_path, monkeypatch):
    """Write a profile into a folder of the search path."""
    monkeypatch.setenv("TORCHREPRO_PATH", str(tmp_path))
    return write


@pytest.fixture
def ask(command, tmp_path):
    """Request a profile from a command; returns the exit status."""

    def ask(name, profile, *words):
        more = {
            "lock": ("-o", tmp_path / "repro.lock"),
            "diff": ("seed-only",),
            "run": ("--", sys.executable, "-c", "raise SystemExit(9)"),
            "verify": ("--", sys.executable, "-c", "raise SystemExit(9)"),
        }.get(name, ())
        return command(name, profile, *words, *more)[0]

    return ask


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_dangerous_and_unconsented_variables(ask, write, name):
    """A variable that runs code is refused with or without consent, as is consent to it."""
    for case in OF_THE_TRIAL:
        variable, value = RUNS_CODE[case]
        path = write(f"seed: 1\nenv_extra: {{{variable}: '{value}'}}\n", "evil.yaml")
        assert ask(name, path) == 2
        assert ask(name, path, "--allow-env", variable) == 2

    assert ask(name, write(UNKNOWN, "theirs.yaml")) == 2
    assert ask(name, "seed-only", "--allow-env", "LD_PRELOAD") == 2


@pytest.mark.parametrize("case", RUNS_CODE)
def test_dangerous_variables_are_refused_in_code_and_under_hydra_and_pytest(
    write, hydra_app, monkeypatch, case
):
    """Neither a file, nor a dict, nor consent, nor a typed override sets such a variable."""
    variable, value = RUNS_CODE[case]
    monkeypatch.setenv(VARIABLE, variable)
    text = f"seed: 1\nenv_extra: {{{variable}: '{value}'}}\n"
    path = str(write(text, "conf/repro/evil.yaml"))
    for asked in (path, {"env_extra": {variable: value}}):
        with pytest.raises(torchrepro.ProfileError):
            torchrepro.apply(asked)
    with pytest.raises(torchrepro.ProfileError):
        torchrepro.load("seed-only", [f"env_extra.{variable}='{value}'"])
    if case == OF_THE_TRIAL[0]:
        assert hydra_app("+repro=evil", **{VARIABLE: variable}).status == 3
        assert _under_pytest(path) == 4


def _under_pytest(path, *words):
    """Return the status of a session without tests under the profile: 5, or 4 if refused."""
    words = [sys.executable, "-m", "pytest", "-q", f"--repro={path}", *words, "--ignore=."]
    folder = Path(path).parent
    done = subprocess.run(words, cwd=folder, capture_output=True, timeout=300, check=False)
    return done.returncode


@pytest.mark.parametrize("name", ["show", "plan", "env", "lock", "diff"])
def test_an_option_and_a_variable_consent_by_name(ask, write, monkeypatch, name):
    """They consent to the variables that they name, and to no others."""
    path = write("env_extra: {ACME_FLAG: '7', ACME_MODE: a/b}\n", "theirs.yaml")
    fine = 1 if name == "diff" else 0

    assert ask(name, path, "--allow-env", "ACME_FLAG") == 2
    assert ask(name, path, "--allow-env", "ACME_FLAG", "--allow-env", "ACME_MODE") == fine
    monkeypatch.setenv(VARIABLE, "ACME_FLAG")
    assert ask(name, path) == 2
    assert ask(name, path, "--allow-env", "ACME_MODE") == fine
    monkeypatch.setenv(VARIABLE, " ACME_MODE, ACME_FLAG ")
    assert ask(name, path) == fine


def test_a_run_has_the_variable_that_was_consented_to(write):
    """The command of `run` has the variable, and the same profile in it needs no new consent."""
    path = write(f"seed: 1\n{UNKNOWN}", "theirs.yaml")
    code = (
        "import os, torchrepro; print(os.environ['ACME_FLAG'], torchrepro.load("
        f"{str(path)!r}).resolved.environment()['ACME_FLAG'])"
    )
    words = ["-m", "torchrepro", "run", path, "--allow-env", "ACME_FLAG", "--"]
    done = subprocess.run(
        [sys.executable, *words, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert done.stdout == "7 7\n"


@pytest.mark.parametrize("typed", TYPED)
def test_a_typed_value_is_consent(write, typed):
    """A user who sets the variable in an override, or passes a dict, has consented to it."""
    path = str(write(UNKNOWN, "theirs.yaml"))
    given = torchrepro.load(path, [typed])

    assert given.resolved.environment() == {"ACME_FLAG": "8"}
    assert torchrepro.load("seed-only", [typed]).resolved.environment()["ACME_FLAG"] == "8"
    with torchrepro.apply(given, ["seed=3"]):
        assert os.environ["ACME_FLAG"] == "8"
    with torchrepro.apply({"defaults": ["theirs", "_self_"], "env_extra": {"ACME_FLAG": "9"}}):
        assert os.environ["ACME_FLAG"] == "9"


def _by_others(write):
    """Return ways in which the author of a profile might pretend to be the user."""
    theirs = str(write(UNKNOWN, "theirs.yaml"))
    write(UNKNOWN, "with/theirs.yaml")
    config = OmegaConf.create(UNKNOWN)
    return {
        "a file": (theirs, []),
        "a file that inherits": (str(write("defaults: [theirs]\n", "inherits.yaml")), []),
        "a piece": (str(write("defaults: [with/theirs, _self_]\n", "mine.yaml")), []),
        "an override of another key": (theirs, ["env_extra.ACME_OTHER=1", "name=ACME_FLAG"]),
        "an override of an empty section": (theirs, ["env_extra={}"]),
        "a config": (config, []),
        "a config with an override": (config, ["seed=3"]),
        "a config's section in a dict": ({**config}, []),
        "a dict that inherits": ({"defaults": ["_self_", "theirs"], "seed": 1}, []),
        "a dict below a file": (
            {"defaults": ["_self_", "theirs"], "env_extra": {"ACME_FLAG": "1"}},
            [],
        ),
    }


@pytest.mark.parametrize("case", _by_others(lambda *_: "x.yaml"))
def test_the_author_of_a_profile_does_not_consent(write, case):
    """No contents of a file or a config are consent, however they are read."""
    source, overrides = _by_others(write)[case]
    with pytest.raises(torchrepro.ProfileError) as caught:
        torchrepro.plan(source, overrides)

    assert "env_extra.ACME_FLAG" in {problem.key for problem in caught.value.problems}


def test_the_overrides_in_a_lock_do_not_consent(command, tmp_path):
    """A lock is a file: the user of a lock has to consent again to the variables it sets."""
    lock = tmp_path / "repro.lock"
    command("lock", "seed-only", "env_extra.ACME_FLAG=7", "-o", lock)

    assert command("check", lock)[0] == 1
    assert command("run", "--lock", lock, "--", "no-such-command")[0] == 1
    assert command("check", lock, "--allow-env", "ACME_FLAG")[0] == 0


HYDRA = {
    "nobody consents": (["+repro=theirs"], "", 3),
    "the variable consents": (["+repro=theirs"], "ACME_FLAG", 0),
    "a typed override": (["+repro=theirs", "repro.env_extra.ACME_FLAG=8"], "", 0),
    "a typed section": (["+repro=seed-only", "repro.env_extra={ACME_FLAG: 8}"], "", 0),
    "an override of another key": (["+repro=theirs", "repro.name=ACME_FLAG"], "", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HYDRA)
def test_consent_under_hydra(write, hydra_app, case):
    """The task runs only if the variable or an override on the command line consents."""
    arguments, consent, status = HYDRA[case]
    write(UNKNOWN, "conf/repro/theirs.yaml")

    ended = hydra_app(*arguments, **{VARIABLE: consent})

    assert (ended.status, ended.out) == (status, "RAN\n" if status == 0 else ""), ended.err


@pytest.mark.slow
def test_consent_under_pytest(write):
    """A session's profile needs consent, which `--repro-set` gives."""
    path = write(UNKNOWN, "theirs.yaml")

    assert _under_pytest(path) == 4
    assert _under_pytest(path, "--repro-set=env_extra.ACME_FLAG=1") == 5


NEAR = {
    "TOKENIZER_PARALLELISM": "env_extra.TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREAD": "env.OMP_NUM_THREADS",
    "ACME_FLAG": "",
}


def test_a_refused_variable_is_shown_with_the_nearest_one(load_text):
    """The problem names the line, the variable, the nearest one, and how to consent."""
    with pytest.raises(torchrepro.ProfileError) as caught:
        load_text("env_extra:\n" + "".join(f"  {name}: '1'\n" for name in NEAR))

    assert [problem.key for problem in caught.value.problems] == [f"env_extra.{n}" for n in NEAR]
    for line, problem in enumerate(caught.value.problems, start=2):
        name = problem.key.removeprefix("env_extra.")
        assert problem.where.endswith(f"bad.yaml:{line}")
        assert problem.near == NEAR[name]
        assert f"--allow-env {name}" in problem.todo
        assert VARIABLE in problem.todo


def test_another_value_of_an_allowed_variable_needs_consent(load_text, monkeypatch):
    """A value outside the row is refused with the legal values, and set with consent."""
    text = "env_extra: {WANDB_MODE: offlin, NCCL_DEBUG: /tmp/x}\n"
    with pytest.raises(torchrepro.ProfileError) as caught:
        load_text(text)
    mode, debug = caught.value.problems

    assert mode.near == "offline"
    assert debug.legal == allowed()["NCCL_DEBUG"].legal.words
    monkeypatch.setenv(VARIABLE, "WANDB_MODE,NCCL_DEBUG")
    assert load_text(text).resolved.environment()["WANDB_MODE"] == "offlin"


REAL = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,COLL",
    "OPENBLAS_NUM_THREADS": "4",
    "OMP_PLACES": "{0:4},{4:4}",
    "OMP_PROC_BIND": "close",
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
    "GOMP_CPU_AFFINITY": "0-3 6 8-14:2",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128,"
    "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:4]",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,page_size:1G",
    "TORCH_LOGS": "+dynamo,-inductor,recompiles",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HSA_OVERRIDE_GFX_VERSION": "10.3.0",
    "LC_ALL": "en_US.UTF-8",
    "PYTHONUNBUFFERED": "1",
    "HYDRA_FULL_ERROR": "1",
}


def test_common_settings_need_no_consent(load_text):
    """A file may set the variables that teams commonly share."""
    assert load_text(f"env_extra: {json.dumps(REAL)}\n").resolved.environment() == REAL


NOT_SHIPPED = (
    *("WANDB_BASE_URL", "HF_ENDPOINT", "NETRC", "WANDB_ENTITY", "NCCL_SOCKET_IFNAME", "NCCL_NET"),
    *("WANDB_API_KEY", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI", "XLA_FLAGS"),
    *("HF_DATASETS_TRUST_REMOTE_CODE", "USE_HUB_KERNELS", "TORCH_SYMBOLIZE_MODE", "TERM"),
)


def test_a_row_of_the_allow_list_is_a_harmless_new_variable():
    """No row is in the catalogue, names a credential, is dangerous, or has no effect."""
    assert {name: why for name in allowed() if (why := refusal(name))} == {}
    assert allowed().keys() & {knob.variable for knob in CATALOGUE} == set()
    assert allowed().keys() & set(NOT_SHIPPED) == set()
    assert [name for name, row in allowed().items() if not row.summary or not row.legal.words] == []


WORD = re.compile(r"[A-Za-z0-9_+^-]*")
NUMBERS = re.compile(r"[0-9]+(\.[0-9]+)+")
DOTTED = {"LANG": "UTF-8", "LC_ALL": "UTF-8"}
"""Rows whose value has a dot between words, which their reason explains."""

COLONS = ("ALLOC_CONF", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Rows whose value has a colon, which their reason explains."""


def _harmless(name, value):
    """Return whether `value` consists of words and numbers: no path, host, module, or command."""
    parts = re.split(r"[,=: ()\[\]{}>]", value)
    if ":" in value and not name.endswith(COLONS):
        return False
    if name in DOTTED:
        parts = [re.sub(r"\.(UTF|utf)-?8$", "", part) for part in parts]
    return all(WORD.fullmatch(part) or NUMBERS.fullmatch(part) for part in parts)


LEGAL = list({row.legal: name for name, row in allowed().items()}.values())
"""One row for each kind of value."""


@settings(max_examples=150, derandomize=True)
@given(name=st.sampled_from(LEGAL), data=st.data())
def test_a_row_of_the_allow_list_admits_only_words_and_numbers(name, data):
    """Legal values are words and numbers; the reason of a row explains any `.` or `:`."""
    legal = allowed()[name].legal
    flags = re.IGNORECASE | re.ASCII if legal.ignore_case else re.ASCII
    value = data.draw(st.from_regex(re.compile(legal.pattern, flags), fullmatch=True))

    assert legal.complaint(value) == ""
    for row in allowed().values():
        if row.legal == legal:
            assert _harmless(row.variable, value), (row.variable, value)
            for mark, said in ((":", ":"), (".", "dot|number")):
                assert mark not in value or re.search(said, f"{row.summary} {legal.words}")


HARMFUL = ("/tmp/x", "a.b", "module.fn", "host:80", "http://h", "../x", "1\n", "$HOME", "a;b")


def test_no_row_admits_a_path_a_host_or_a_module():
    """No row of the allow list or the catalogue accepts the name of code, a file or a host."""
    rows = {row.variable: row.legal for row in allowed().values()}
    rows |= {knob.variable: knob.legal for knob in CATALOGUE if knob.variable}

    assert [(n, v) for n, legal in rows.items() for v in HARMFUL if not legal.complaint(v)] == []
