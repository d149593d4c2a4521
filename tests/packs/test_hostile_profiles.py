"""A hostile pack is refused quickly, with a clear message, and does nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

import torchrepro

from .conftest import Link, install
from .hostile_profiles import CALLBACK, HOSTILE, LEAVES_A_MARK

STATUSES = {"show": 2, "hydra": 3}
PROGRAM = Path(__file__).with_name("guarded_process.py")
SECRETS = ("the-secret-of-a-variable", "the-secret-of-a-file")
OURS = Path(torchrepro.__file__).parent
SITES = [path for path in sys.path if Path(path).name == "site-packages"]
PYTHONS = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *SITES)]
PYTHONS += [
    Path(sysconfig.get_path("stdlib")).resolve(),
    OURS.resolve(),
    OURS.parent.parent.resolve(),
]
SECONDS = 1.0
MEGABYTES = 100
GOOD = "defaults: [base]\nseed: 3\n"


def _at(folder, content):
    return (
        replace(content, to=content.to.format(folder=folder))
        if isinstance(content, Link)
        else content
    )


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Return a function that requests a profile by `show` and Hydra and returns both answers."""
    root = tmp_path_factory.mktemp("hostile")
    folder = root / "at_hand"
    (folder / "secrets_here").mkdir(parents=True)
    (folder / "secrets_here" / "creds.yaml").write_text(
        f"password: {SECRETS[1]}\n", encoding="utf-8"
    )
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with (
        (root / "errors").open("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            [sys.executable, "-P", PROGRAM],
            cwd=root,
            env={**os.environ, "SECRET": SECRETS[0], "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):

        def ask_once(named, files, **options):
            site = tmp_path_factory.mktemp("site")
            files = {name: _at(folder, content) for name, content in files.items()}
            install(site, "acme-pack", files, **options)
            request = {"site": str(site), "named": named, "folder": str(folder)}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, errors.seek(0) or errors.read()
            return json.loads(answer), site

        yield ask_once
        process.stdin.close()


@pytest.fixture(scope="module", params=HOSTILE)
def asked(request, ask):
    """Request each hostile profile once; returns the case, the answers, and the pack's folder."""
    hostile = HOSTILE[request.param]
    code = {"__init__.py": LEAVES_A_MARK, "/evil_code.py": LEAVES_A_MARK}
    answers, site = ask(
        hostile.named,
        {**code, **hostile.files},
        entry_points=hostile.entry_points,
        metadata=hostile.metadata,
    )
    return hostile, answers, site


def _may_be_opened(path, site):
    opened = Path(path)
    if not opened.is_absolute() or path.startswith(("/dev/null", "/proc/self")):
        return True  # in the current folder, which the test checks for secrets
    target = opened.resolve()
    # Python reads the source line of a warning, such as Hydra 1.4's on `version_base`.
    allowed = (site, PROGRAM.resolve(), *PYTHONS)
    return any(target.is_relative_to(folder) for folder in allowed)


@pytest.mark.sampled(4)
def test_a_hostile_profile_is_refused_by_every_command(asked):
    """Each command exits with its status and a message that says why, without a traceback."""
    hostile, answers, _ = asked

    assert {name: answer["status"] for name, answer in answers.items()} == STATUSES, answers
    for answer in answers.values():
        message = answer["err"]
        assert answer["out"] == ""
        assert "Traceback" not in message
        assert [word for word in hostile.words if word not in message] == [], message
        assert len(message) < 6000
        assert all(letter.isprintable() or letter == "\n" for letter in message)


@pytest.mark.sampled(4)
def test_a_hostile_profile_does_nothing(asked):
    """It runs no code, shows no secret, opens no other files, starts and connects to nothing."""
    _, answers, site = asked

    assert list(site.rglob("marker")) == []
    for answer in answers.values():
        assert answer["environment"]
        assert answer["acts"] == []
        assert [m for m in answer["imported"] if m.startswith(("acme_pack", "evil_code"))] == []
        assert [secret for secret in SECRETS if secret in answer["err"]] == []
        assert [path for path in answer["opened"] if not _may_be_opened(path, site)] == []
        assert [path for path in answer["opened"] if "secrets_here" in path] == []


@pytest.mark.sampled(4)
def test_a_hostile_profile_is_refused_at_once(asked):
    """Each refusal takes less than a second and a hundred megabytes."""
    _, answers, _ = asked

    for name, answer in answers.items():
        assert answer["seconds"] < SECONDS, name
        assert answer["memory"] < MEGABYTES * 1024, name


def test_a_valid_profile_is_shown_and_run(ask):
    """The commands that refuse hostile profiles accept a valid one."""
    answers, _ = ask("team/good", {"good.yaml": GOOD, "base.yaml": "dropout: zero\n"})

    assert {answer["status"] for answer in answers.values()} == {0}, answers
    assert "seed: 3" in answers["show"]["out"]
    assert answers["hydra"]["out"] == "RAN\n"


APP = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    print("RAN")

main()
"""
FILES = {  # Hydra would compose these if its search path contained them
    "repro/plain.yaml": CALLBACK,
    "repro/_hidden.yaml": CALLBACK,
    "repro/.dotted.yaml": CALLBACK,
    "repro/a..b.yaml": CALLBACK,
    "repro/in/_hidden.yaml": CALLBACK,
    "repro/with/_hidden.yaml": CALLBACK,
    "beside.yaml": CALLBACK,
    "repro/secret.yaml": "description: ${oc.env:SECRET}\n",
    "repro/link.yaml": Link("/etc/hostname"),
}
ASKED = (
    "+repro=plain",
    "+repro=_hidden",
    "+repro=.dotted",
    "+repro=a..b",
    "+repro=in/_hidden",
    "+repro/in=_hidden",
    "+repro/with=_hidden",
    "+repro=../beside",
    "+repro=secret",
    "+repro=link",
    "+repro=team/repro/plain",
)


@pytest.mark.parametrize("asked", ASKED)
def test_hydra_never_composes_a_file_of_a_pack(installed_pack, fork_python, tmp_path, asked):
    """No name of a file gets around us: no code runs, and no task."""
    pack = installed_pack("acme-pack", {**FILES, "/evil_code.py": LEAVES_A_MARK})
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "SECRET": "the secret"}
    done = fork_python("app.py", asked, "hydra.searchpath=[pkg://acme_pack]", env=variables)

    assert not (pack.site / "marker").exists()
    # Hydra 1.4 itself refuses a name that leads out of a group, with its own status.
    hydra_refused = asked == "+repro=../beside" and "Parent traversal" in done.stderr
    assert (done.returncode, done.stdout) == (1 if hydra_refused else 3, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert "the secret" not in done.stderr
