"""No secret leaves: whatever torchrepro writes or prints holds none of those planted here."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing

import pytest

from torchrepro.knobs.variables import RECORDED

from ..verification.repositories import commit, git

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
    "MYSQL_PWD": "swordfishes",
    "SSHPASS": "open-sesame-11",
    "DATABASE": "postgres://alice:mellonmellon@db.example/x",
    "GOOGLE_CREDENTIALS": '{"private_key": "MIIEvQIBADANBgkqhkiG9w0B"}',
}
REMOTE = "https://carol:gitgud-gitgud@host.example/team/repo.git"
ARGUMENTS = (
    *("--api-key", "abracadabra", "-c", "login('letmeinletmein')"),
    *("--set", "db.password=dragondragon", "https://host.example/hook?sig=qwertyqwerty"),
    *(VARIABLES["MYSQL_PWD"], f"--name=run-{VARIABLES['SSHPASS']}"),
    f"--tags=[a,{VARIABLES['HF_TOKEN']}]",
)
"""Each form that an argument may have stands in tests/manifest/test_command_line.py."""

SECRETS = (
    *(value for name, value in VARIABLES.items() if "://" not in value and "{" not in value),
    *("mellonmellon", "MIIEvQIBADANBgkqhkiG9w0B", "gitgud-gitgud", "abracadabra"),
    *("letmeinletmein", "dragondragon", "qwertyqwerty"),
)
HYDRAS_OWN = ("config.yaml", "hydra.yaml", "overrides.yaml")


@pytest.mark.slow
def test_no_planted_secret_is_in_anything_that_is_written_or_printed(
    tmp_path, execute, command, monkeypatch
):
    """Secrets in variables, remotes and arguments are in no manifest, lock, trace or output."""
    monkeypatch.chdir(tmp_path)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    commit(tmp_path, {"app.py": PROGRAM})
    git(tmp_path, "remote", "add", "origin", REMOTE)
    program = (sys.executable, "app.py", "+repro=debug-strict", "hydra.run.dir=out", *ARGUMENTS)
    run = ("run", "debug-strict", "--record", "recorded", "--", *program)
    recorded = execute(sys.executable, "-m", "torchrepro", *run, env=VARIABLES)
    assert recorded.returncode == 0, recorded.stderr
    written = [recorded.stdout, recorded.stderr]
    for words, status in (
        (("lock", "debug-strict", "-o", "repro.lock"), 0),
        (("check", "repro.lock", "--strict", "--json"), 0),
        (("check", "repro.lock"), 0),
        (("diff", "out", "recorded"), 0),
        (("diff", "out", "repro.lock", "--json"), 0),
        (("run", "--lock", "repro.lock", "seed-only", "--", *program), 1),
        (("run", "debug-strict", "--", "no-such-program", *ARGUMENTS), 2),
        (("rerun", "out"), 2),
        (("rerun", "out", "--dry-run", "--", *program), 0),
    ):
        ended, *said = command(*words)
        assert ended == status, said
        written += said
    files = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and ".git" not in path.parts and path.name not in HYDRAS_OWN
    ]
    everything = "".join(written).encode() + b"".join(path.read_bytes() for path in files)
    manifest = json.loads((tmp_path / "out/.hydra/repro.json").read_text(encoding="utf-8"))

    assert {"repro.json", "repro.lock", "rank0.sqlite"} <= {path.name for path in files}
    assert [secret for secret in SECRETS if secret.encode() in everything] == []
    assert manifest["started"]["command"] == manifest["command_line"]
    assert manifest["command_line"][1:4] == ["app.py", "+repro=debug-strict", "hydra.run.dir=out"]
    assert len(manifest["repository"]["remotes"]) == 1
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


RECORDED_PROGRAM = """
import os, sys, threading
import torch, torchrepro

NAMES = ("GITHUB_PAT", "MY_PASSWORD", "SERVICE_TOKEN")
pat, password, _ = (os.environ[name] for name in NAMES)
os.environ["LATE_API_KEY"] = late = "abracadabra-late-11"
namespace = torch.library.Library("planted", "DEF")
namespace.define("say(Tensor x, str word, *, str? api_key=None) -> Tensor")
namespace.impl("say", lambda x, word, api_key=None: x + 1, "CPU")
say = torch.ops.planted.say

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleDict({password: torch.nn.Linear(2, 2)})

    def forward(self, x):
        for layer in self.inner.values():
            x = layer(x)
        return x

torchrepro.apply("seed-only", ["env_extra.MY_MODE=" + password])
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with torchrepro.record("recorded", keep=(password,)) as recording:
    for word in (pat, "a" + pat + "b", late, os.environ["SERVICE_TOKEN"],
                 "https://me:%s@host/x" % pat, "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"):
        say(torch.ones(2), word)
    say(torch.ones(2), "plain", api_key="swordfishes")
    thread = threading.Thread(target=lambda: torch.ones(2) + 1, name="thread " + password)
    thread.start()
    thread.join()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for name in os.listdir("recorded"):  # what is on the disk while it goes on: the log as well
        open("meanwhile", "ab").write(open(os.path.join("recorded", name), "rb").read())
    os.environ["LATER_TOKEN"] = "hocuspocus-later-22"
    say(torch.ones(2), "hocuspocus-later-22")
"""
PLANTED = {
    "GITHUB_PAT": "pat-9f8e7d6c5b4a",
    "MY_PASSWORD": "swordfishes-11",
    "SERVICE_TOKEN": "quotation'te\"d\\ back\nslashslash",  # in parts too long to come by chance
}


@pytest.mark.slow
def test_a_recording_holds_no_secret_of_the_program(tmp_path, execute):
    """Secrets in arguments of ops, names of threads and modules, and knobs are not in its bytes."""
    done = execute(sys.executable, "-c", RECORDED_PROGRAM, env=PLANTED)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "recorded").iterdir()
    everything = (tmp_path / "meanwhile").read_bytes() + path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        meta = dict(connection.execute("select key, value from meta"))
        steps = [json.loads(text) for (text,) in connection.execute("select names from step")]
    kinds = ("sites", "arguments", "threads")
    names = {key: [each for step in steps for each in step.get(key, ())] for key in kinds}
    (linear,) = [site for site in names["sites"] if "aten::addmm" in site]

    for secret in (
        *("pat-9f8e7d6c5b4a", "swordfishes", "abracadabra-late-11", "hocuspocus-later-22"),
        *("hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "quotation", "slashslash"),
    ):
        assert secret.encode() not in everything
    assert "(_, 'plain', api_key=(hidden))" in names["arguments"]
    assert json.loads(meta["knobs"])["env_extra.MY_MODE"] == "(hidden)"
    assert "inner.(hidden)" in linear
    assert "thread (hidden)" in names["threads"]
