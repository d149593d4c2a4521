"""Redaction of command lines: no possible secret is shown, and everything else is."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.ground.redaction import (
    HIDDEN,
    secret_values,
    shareable,
    sounds_secret,
    without_secrets,
)

SHOWN = (
    ["python", "train.py", "--lr", "0.1", "--epochs=10", "--model", "resnet50"],
    ["python", "train.py", "+repro=debug-strict", "repro.seed=7", "optimizer=adamw"],
    ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
    ["python", "train.py", "data.shape=[3,224,224]", "-m", "seed=1,2,3", "--amp", "--lr=1e-4"],
    ["python", "train.py", "--store", "s3://bucket/data/imagenet"],
    ["python", "train.py", "-o", "out", "-i", "data/images", "-f=runs/new"],
)
NAMED = (  # however plain the value is, its name says that it is none to show
    ["--api-key", "{}"],
    ["--api-key={}"],
    ["--token={}"],
    ["--password", "{}"],
    ["--pass", "{}"],
    ["--passcode", "{}"],
    ["--mfa={}"],
    ["login", "password", "{}"],
    ["--apiKey", "{}"],
    ["--auth-token", "--api-key", "{}"],
    ["--secrets", "one", "{}"],
    ["-p", "{}"],
    ["-p{}"],
    ["-p={}"],
    ["-o", "password={}"],
    ["-u", "alice:{}"],
    ["--user", "alice:{}"],
    ["api.key={}"],
    ["+api.key={}"],
    ["++service/password={}"],
    ["--set", "auth.password={}"],
    ["--set=auth.password={}"],
    ["--env", "WANDB_API_KEY={}"],
    ['--config={{"password": "{}"}}'],
    ['{{"token": "{}"}}'],
    ["--json", "{{'a': '{}'}}"],
    ["-H", "Authorization: Bearer {}"],
    ["--header=Authorization: Bearer {}"],
    ["Authorization: Basic {}"],
    ["-c", "login('{}')"],
    ["https://alice:{}@host.example/x"],
    ["https://{}@host.example/x"],
    ["https://host.example/x?sig={}"],
    ["--push-to=https://host.example/x?sig={}"],
    ["x=postgres://alice:{}@db/x"],
    ["alice:{}@host"],
    ["--webhook", "https://hooks.example/services/{}"],
)
PLAIN = st.text(string.ascii_lowercase, min_size=6, max_size=12).map(lambda text: f"zq{text}")
KEYS = st.one_of(
    st.binary(min_size=12, max_size=32).map(bytes.hex),
    st.from_regex(r"ghp_[A-Za-z0-9]{36}", fullmatch=True),
    st.from_regex(r"sk-[a-z]{4}-[A-Za-z0-9]{24}", fullmatch=True),
    st.from_regex(r"AKIA[A-Z0-9]{16}", fullmatch=True),
    st.uuids().map(str),
).filter(lambda key: not key.isdigit())


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_an_ordinary_command_line_is_shown_completely(words):
    """Options, numbers, names, paths and overrides without a secret are shown unchanged."""
    assert shareable(words, ()) == words


@pytest.mark.parametrize("form", NAMED, ids=" ".join)
@given(secret=PLAIN)
def test_a_value_with_a_secret_name_or_form_is_hidden(form, secret):
    """A secret that looks like a word is hidden because of its option, its key, or its context."""
    words = ["python", "train.py", *(word.format(secret) for word in form), "--lr", "1"]
    shown = shareable(words, ())

    assert secret not in " ".join(shown)
    assert HIDDEN in " ".join(shown)
    assert shown[:2] == ["python", "train.py"]


@given(secret=KEYS, before=st.sampled_from(["", "--name=", "model=", "--", "a.b.c=x,", "./"]))
def test_a_key_is_hidden_in_any_position(secret, before):
    """A text in the form of a key or token is hidden, also without a name."""
    shown = " ".join(shareable(["python", "train.py", before + secret], ()))

    assert secret not in shown


@given(
    secret=st.one_of(
        PLAIN,
        KEYS,
        st.text(min_size=1).filter(lambda text: text not in "train.py" and text != HIDDEN),
    ),
    name=st.sampled_from(["WANDB_API_KEY", "HF_TOKEN", "MYSQL_PWD", "SSHPASS", "DbPassword"]),
)
def test_the_value_of_a_secret_variable_is_hidden_as_an_argument(secret, name):
    """An argument that equals the value of a secret variable is hidden, whatever its form."""
    shown = shareable(["python", "train.py", secret], secret_values({name: secret}))

    assert shown[2] != secret


@given(secret=KEYS, around=st.text(" ./:=", max_size=3))
def test_the_value_of_a_secret_variable_is_removed_from_any_text(secret, around):
    """No text, key or list that is written contains the value of a secret variable."""
    secrets = secret_values({"SERVICE_TOKEN": secret, "HOME": "/root", "LANG": "C"})
    text = f"a{around}{secret}{around}b"
    cleaned = str(without_secrets({text: [text, {"why": text, "number": 3}]}, secrets))

    assert secret not in cleaned
    assert "3" in cleaned


@pytest.mark.parametrize(
    ("url", "secret"),
    [("postgres://alice:pw-4711@db/x", "pw-4711"), ("https://tok4711abc@host/x", "tok4711abc")],
)
def test_a_password_in_any_variable_is_a_secret(url, secret):
    """The login of a URL in a variable of any name is hidden everywhere."""
    assert secret in secret_values({"DATABASE": url})


@pytest.mark.parametrize("name", ["PATH", "HOME", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"])
def test_names_of_everyday_variables_are_not_secret(name):
    """A name that only begins like a secret's is not secret: its value would spoil other text."""
    assert not sounds_secret(name)


@pytest.mark.parametrize("value", ["1", "true", "error", "/usr", "cpu"])
def test_a_common_value_spoils_no_other_text(value):
    """A secret variable's value that is an everyday word is not removed from messages."""
    its = {"device.fallback": "error", "dropout": "true", "path": "/usr/bin", "rng": "cpu 1"}

    assert without_secrets(its, secret_values({"SOME_KEY": value})) == its
