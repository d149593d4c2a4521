"""No secret leaves: whatever torchrepro writes or prints holds none of those planted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchrepro.manifest.contents import RECORDED

SCRIPT = str(Path(sys.executable).with_name("torchrepro"))
PROGRAM = """
import sys
import hydra, torch

sys.argv = [word for word in sys.argv if word.startswith(("+repro", "repro.", "hydra.", "/"))
            or word.endswith(".py")]

@hydra.main(version_base=None, config_path=None)
def main(config):
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()

if __name__ == "__main__":
    main()
"""
VARIABLES = {
    "WANDB_API_KEY": "0f3e9d8c7b6a5f4e3d2c1b0a9f8e7d6c5b4a3f2e",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzzzz",
    "GITHUB_TOKEN": "ghp_qrstuvwxyzabcdefghijklmnop0123456789",
    "MYSQL_PWD": "swordfishes",
    "SSHPASS": "open-sesame-11",
    "DATABASE": "postgres://alice:mellonmellon@db.example/x",
    "GOOGLE_CREDENTIALS": '{"private_key": "MIIEvQIBADANBgkqhkiG9w0B"}',
    "HTTPS_PROXY": "http://bob:trustno1trustno1@proxy.example:3128",
}
REMOTES = {
    "origin": "https://carol:gitgud-gitgud@host.example/team/repo.git",
    "fork": "https://glpat-AbCdEfGh12345678@host.example/fork/repo.git",
    "mirror": "https://host.example/repo.git?private_token=mirrormirror",
}
ARGUMENTS = (
    ("--api-key", "abracadabra"),
    ("--token=alakazamalakazam",),
    ("api.key=hocuspocushocus",),
    ('--config={"password": "simsalabimsim"}',),
    ("-H", "Authorization: Bearer shazamshazam"),
    ("--user", "dave:iloveyouiloveyou"),
    ("-psecretpassword1",),
    ("-c", "login('letmeinletmein')"),
    ("sk-proj-4f8AbC9dEf0GhI1jKl2MnO3p",),
    ("https://host.example/hook?sig=qwertyqwerty",),
    ("--set", "db.password=dragondragon"),
    ("--upload-to=s3://AKIAIOSFODNN7EXAMPLE:monkeymonkey@bucket/x",),
    (VARIABLES["MYSQL_PWD"],),
    (f"--name=run-{VARIABLES['SSHPASS']}",),
    (f"--tags=[a,{VARIABLES['HF_TOKEN']}]",),
)
SECRETS = (
    *(value for name, value in VARIABLES.items() if "://" not in value and "{" not in value),
    *("mellonmellon", "trustno1trustno1", "MIIEvQIBADANBgkqhkiG9w0B"),
    *("gitgud-gitgud", "glpat-AbCdEfGh12345678", "mirrormirror", "abracadabra"),
    *("alakazamalakazam", "hocuspocushocus", "simsalabimsim", "shazamshazam"),
    *("iloveyouiloveyou", "secretpassword1", "letmeinletmein", "4f8AbC9dEf0GhI1jKl2MnO3p"),
    *("qwertyqwerty", "dragondragon", "monkeymonkey", "AKIAIOSFODNN7EXAMPLE"),
)
HYDRAS_OWN = ("config.yaml", "hydra.yaml", "overrides.yaml")


@pytest.mark.slow
def test_no_planted_secret_is_in_anything_that_is_written_or_printed(tmp_path, clean_environment):
    """Secrets in variables, remotes and arguments are in no manifest, lock, trace or output."""
    where = tmp_path / "work"
    where.mkdir()
    environment = clean_environment | VARIABLES
    (where / "app.py").write_text(PROGRAM, encoding="utf-8")

    def run(*words, status=0):
        done = subprocess.run(
            [str(word) for word in words],
            cwd=where,
            env=environment,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, done.stderr.decode()
        return done.stdout + done.stderr

    run("git", "init")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    run("git", "add", ".")
    run("git", *identity, "commit", "-m", "one")
    for name, url in REMOTES.items():
        run("git", "remote", "add", name, url)
    arguments = [word for words in ARGUMENTS for word in words]
    program = (sys.executable, "app.py", "+repro=debug-strict", "hydra.run.dir=out", *arguments)
    written = [
        run(SCRIPT, "run", "debug-strict", "--record", "recorded", "--", *program),
        run(SCRIPT, "lock", "debug-strict", "-o", "repro.lock"),
        run(SCRIPT, "check", "repro.lock", "--strict", "--json"),
        run(SCRIPT, "check", "repro.lock"),
        run(SCRIPT, "diff", "out", "recorded"),
        run(SCRIPT, "diff", "out", "repro.lock", "--json"),
        run(SCRIPT, "lock", "seed-only", "-o", "other.lock"),
        run(SCRIPT, "run", "--lock", "repro.lock", "seed-only", "--", *program, status=1),
        run(SCRIPT, "run", "debug-strict", "--", "no-such-program", *arguments, status=2),
    ]
    files = [
        path
        for path in where.rglob("*")
        if path.is_file() and ".git" not in path.parts and path.name not in HYDRAS_OWN
    ]
    everything = b"".join([*written, *(path.read_bytes() for path in files)])
    manifest = json.loads((where / "out/.hydra/repro.json").read_text(encoding="utf-8"))

    assert {"repro.json", "repro.lock", "rank0.sqlite"} <= {path.name for path in files}
    assert len(SECRETS) >= 20
    assert [secret for secret in SECRETS if secret.encode() in everything] == []
    assert manifest["command_line"][1:4] == ["app.py", "+repro=debug-strict", "hydra.run.dir=out"]
    assert len(manifest["repository"]["remotes"]) == len(REMOTES)
    assert set(manifest["environment"]) <= set(RECORDED)


@pytest.mark.parametrize("name", ["MYSQL_PWD", "SSHPASS"])
def test_a_profile_holds_no_secret_and_shows_none(command, tmp_path, name):
    """A variable whose name sounds secret is refused in a profile, by name and never by value."""
    secret = VARIABLES[name]
    profile, lock = tmp_path / "ours.yaml", tmp_path / "repro.lock"
    profile.write_text(f"env_extra: {{{name}: {secret}}}\n", encoding="utf-8")
    for words in ((profile,), ("seed-only", f"env_extra.{name}={secret}")):
        for asked in (("show",), ("plan", "--json"), ("lock", "-o", lock)):
            status, out, err = command(asked[0], *words, *asked[1:])

            assert (status, out) == (2, "")
            assert f"env_extra.{name}" in err
            assert "credential" in err
            assert secret not in err
    assert list(tmp_path.iterdir()) == [profile]


ABOUT = """
import torchrepro
torchrepro.apply("seed-only", ["env_extra.MY_MODE=swordfishes-11"])
import json, torch
from torchrepro.trace.about import about_this_process
print(json.dumps(about_this_process()))
"""


def test_a_recording_tells_no_secret_of_the_knobs(tmp_path, clean_environment):
    """A value of the profile that is a secret of the process is hidden in what a trace says."""
    done = subprocess.run(
        [sys.executable, "-c", ABOUT],
        cwd=tmp_path,
        env={**clean_environment, "MYSQL_PWD": "swordfishes-11"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert json.loads(done.stdout)["knobs"]["env_extra.MY_MODE"] == "(hidden)"
    assert "swordfishes" not in done.stdout
