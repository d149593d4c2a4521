"""Packs that an attacker might publish, with words of the message that refuses each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .conftest import Link, Pipe

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAVES_A_MARK = """
import pathlib
pathlib.Path(__file__).with_name("marker").write_text("imported")

class Evil:
    def __init__(self, *args, **kwargs):
        pass
"""
CALLBACK = "# @package _global_\nhydra: {callbacks: {evil: {_target_: evil_code.Evil}}}\n"
MANY = 1200


@dataclass(frozen=True)
class Hostile:
    """The files of a pack, the requested profile in it, and words of the refusal."""

    files: Mapping[str, Any]
    words: tuple[str, ...]
    named: str = "team/bad"
    entry_points: str | bytes | None = None
    metadata: str | bytes | None = None


def bad(content, *words, **files):
    """Return the case of one bad file."""
    return Hostile({"bad.yaml": content, **files}, words)


def base(entry, *words, **files):
    """Return the case of a profile whose defaults list names `entry`; `files` are further files."""
    content = f"defaults:\n- {entry}\nseed: 1\n"
    source = () if files else ("acme-pack:bad.yaml:",)
    return Hostile({"bad.yaml": content, **files}, (*words, *source))


def named(entry_points, *words, **fields):
    """Return the case of a pack whose entry points are wrong."""
    fields = {"files": {"bad.yaml": "seed: 1\n"}, **fields}
    return Hostile(words=words, entry_points=entry_points, **fields)


def _wide(section, line, count=MANY):
    return f"{section}:\n" + "".join(f"  {line.format(n)}\n" for n in range(count))


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
EDITED = '{"url": "file:///", "dir_info": {"editable": true}}'
GROUP = "[torchrepro.profiles]\n"
NOT_FOUND = "is not a folder here"
NOT_ITS_OWN = "did not come with it"
UNREADABLE = ("unknown profile", "package acme-pack: its entry points cannot be read")

CODE = {
    "a target": bad("_target_: evil_code.Evil\n", "_target_", "runs no code"),
    "a target spelled in escapes": bad('"\\x5ftarget\\u005f": evil_code.Evil\n', "_target_"),
    "a header for everyone": bad(CALLBACK, "# @package _global_", "cannot place itself"),
    "a header after a mark": bad("\ufeff" + CALLBACK, "# @package _global_"),
    "a callback of Hydra's": bad(CALLBACK.partition("\n")[2], "_target_"),
    "a package in the defaults": base("base@_global_", "unknown profile"),
    "an optional base": base("optional base: x", "names of profiles"),
    "a python object": bad("seed: !!python/object:evil_code.Evil {}\n", "tags are refused"),
    "a tag by its handle": bad(
        "%TAG ! tag:yaml.org,2002:python/\n---\nseed: !object/apply:os.system [id]\n", "tags are"
    ),
}
ENVIRONMENT = {
    "a variable by a resolver": bad("description: ${oc.env:SECRET}\n", "calls no resolver"),
    "an interpolation in escapes": bad('name: "\\x24{oc.env:SECRET}"\n', "interpolates nothing"),
    "an interpolation, escaped": bad("name: '\\${oc.env:SECRET}'\n", "interpolates nothing"),
    "a preload": bad("env_extra: {LD_PRELOAD: /tmp/x.so}\n", "dangerous"),
    "a host": bad("env_extra: {https_proxy: 'http://x'}\n", "dangerous"),
    "a preload and its value": bad("env_extra: {'LD_PRELOAD=/x.so\\nA': x}\n", "not the name"),
    "an unknown variable": bad("env_extra: {ACME_FLAG: 1}\n", "--allow-env ACME_FLAG"),
}
PATHS = {
    "an absolute base": base("/etc/hostname", "unknown profile"),
    "a way up": base("../secrets_here/creds", "unknown profile"),
    "a local folder as a package": base("'pkg://secrets_here/creds'", "no such package"),
    "a way up from a package": base("'pkg://acme_pack/../../x'", "unknown profile"),
    "a NUL in a base": base('"a\\0b"', "invisible control character"),
    "a link to a file": Hostile({"bad.yaml": Link("/etc/hostname")}, ("link points outside",)),
    "a link to a folder": Hostile(
        {"away": Link("/etc")}, ("unknown profile",), "team/away/hostname"
    ),
    "a secret behind a folder": Hostile(
        {"away": Link("{folder}/secrets_here")}, ("link points outside",), "team/away/creds"
    ),
    "a link in a base": base(
        "other", "link", **{"other.yaml": Link("{folder}/secrets_here/creds.yaml")}
    ),
    "a pipe": Hostile({"bad.yaml": Pipe()}, ("unknown profile",)),
    "a device": Hostile({"bad.yaml": Link("/dev/zero")}, ("unknown profile",)),
    "a folder": Hostile({"bad.yaml": None}, ("unknown profile",)),
    "a link to itself": Hostile({"bad.yaml": Link("bad.yaml")}, ("unknown",)),
    "two files of one name": Hostile(
        {"bad.yaml": "seed: 1\n", "bad.yml": "seed: 2\n"}, ("two profiles", "bad.yaml, or bad.yml")
    ),
}
BOMBS = {
    "a billion laughs": bad(LAUGHS, "anchors and aliases"),
    "lists in lists": bad(f"seed: {'[' * 9000}\n", "nested deeper"),
    "a list of lists, in lines": bad("- " * 9000 + "x\n", "nested deeper"),
    "50,000 keys": bad("".join(f"k{n}: 1\n" for n in range(25_000)), "more than 2,000"),
    "variables without end": bad(_wide("env_extra", "V{}: a"), "more than 2,000"),
    "a pattern of stars": bad(f"device: {{modules: {{? '{'*a' * 3000}' : cpu}}}}\n", "6,000 chara"),
    "100,000 letters": bad(f"name: {'x' * 100_000}\n", "100,000 characters"),
    "a version of a thousand digits": bad(
        f"requires: {{torch: '>={'9' * 4000}'}}\n", "version range"
    ),
    "a thousand ranges": bad(f"requires: {{torch: '{'>=1,' * 1000}'}}\n", "version range"),
    "64 files": Hostile(
        {f"f{n}.yaml": f"defaults: [f{n + 1}]\nseed: 1\n" for n in range(70)}
        | {"f70.yaml": "seed: 1\n"},
        ("more than 64 files",),
        "team/f0",
    ),
    "three files of 900 keys": Hostile(
        {
            f"f{n}.yaml": f"defaults: [f{n + 1}]\n" + _wide("env_extra", f"V{n}_{{}}: a", 900)
            for n in range(3)
        }
        | {"f3.yaml": "seed: 1\n"},
        ("more than 2,000 keys in the files",),
        "team/f0",
    ),
    "an exponential diamond": Hostile(
        {f"f{n}.yaml": f"defaults: [f{n + 1}, f{n + 1}]\n" for n in range(40)}
        | {"f40.yaml": "seed: 1\n"},
        ("more than 64 files",),
        "team/f0",
    ),
}
VALUES = {
    "a seed of thousands of digits": bad(f"seed: {'9' * 4000}\n", "0 to 4294967295", "seed = "),
    "a seed in YAML 1.1": bad("seed: 1:30:00\n", "seed = 1:30:00", "not a whole number"),
    "a key twice by escapes": bad('seed: 1\n"\\x73eed": 2\n', "duplicate key"),
    "a Cyrillic look-alike": bad("backends: {cudnn: {b\u0435nchmark: true}}\n", "unknown key"),
    "a look-alike of zero width": bad('"se\\u200bed": 1\n', "unknown key"),
    "a number in other digits": bad("env: {OMP_NUM_THREADS: '\u0663'}\n", "not a legal value"),
    "a dotted key": bad("env.LD_PRELOAD: x\n", "unknown key"),
    "colours": bad('description: "\\e[31mred"\n', "invisible control character"),
    "a key that clears the screen": bad('"\\e[2Jseed": 1\n', "invisible control character"),
    "another direction": bad('name: "\\u202egnp.exe"\n', "invisible control character"),
    "half a character": bad('name: "\\ud800"\n', "invalid Unicode"),
}
ENTRY_POINTS = {
    "a module of Python's": named(GROUP + "team = os:system\n", NOT_FOUND),
    "a package with NUL": named(GROUP + "team = acme_pack\0\n", NOT_FOUND),
    "a line without a value": named(GROUP + "team\n", *UNREADABLE),
    "a broken line of another group": named(GROUP + "team = acme_pack\n[others]\nx\n", *UNREADABLE),
    "a foreign package": named(GROUP + "team = yaml\n", NOT_ITS_OWN),
    "torchrepro itself": named(GROUP + "team = torchrepro:conf.repro\n", NOT_ITS_OWN),
    "a local folder": named(GROUP + "team = secrets_here\n", NOT_ITS_OWN, named="team/creds"),
    "a local folder, as an editable install": named(
        GROUP + "team = secrets_here\n",
        NOT_ITS_OWN,
        named="team/creds",
        files={"/acme_pack-1.0.dist-info/direct_url.json": EDITED},
    ),
    "a pack called with": named(GROUP + "with = acme_pack\n", "unknown profile", named="with/bad"),
    "entry points that are not text": named(b"[torchrepro.profiles]\nteam = \xff\n", "unknown"),
    "metadata with colours": named(
        None,
        "evil\\x1b[31m",
        files={"bad.yaml": "sede: 1\n"},
        metadata="Metadata-Version: 2.1\nName: evil\x1b[31m\nVersion: 1\x1b[31m\n",
    ),
    "metadata that is not text": named(
        None, "without a name", files={"bad.yaml": "sede: 1\n"}, metadata=b"Name: \xff\n"
    ),
    "an illegal version": named(
        None,
        "installed",
        files={"bad.yaml": "requires: {acme-pack: '>=1'}\n"},
        metadata="Metadata-Version: 2.1\nName: acme-pack\nVersion: x y\n",
    ),
}
HOSTILE = {**CODE, **ENVIRONMENT, **PATHS, **BOMBS, **VALUES, **ENTRY_POINTS}
