"""What somebody might publish in a pack to do harm, and what each of them is told."""

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
    """Files of a pack, the profile in it that is asked for, and words of the refusal."""

    files: Mapping[str, Any]
    words: tuple[str, ...]
    named: str = "team/bad"
    entry_points: str | bytes | None = None
    metadata: str | bytes | None = None


def bad(content, *words, **more):
    """Return the case of one bad file."""
    return Hostile({"bad.yaml": content, **more}, words)


def base(entry, *words, **files):
    """Return the case of a profile whose defaults list names `entry`; a word may be its line."""
    content = f"defaults:\n- {entry}\nseed: 1\n"
    place = () if files else ("acme-pack:bad.yaml:",)
    return Hostile({"bad.yaml": content, **files}, (*words, *place))


def named(entry_points, *words, **more):
    """Return the case of a pack whose entry points are wrong."""
    more = {"files": {"bad.yaml": "seed: 1\n"}, **more}
    return Hostile(words=words, entry_points=entry_points, **more)


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
    "a target in a section": bad("env: {_target_: evil_code.Evil}\n", "_target_"),
    "a target spelled in escapes": bad('"\\x5ftarget\\u005f": evil_code.Evil\n', "_target_"),
    "a partial target": bad("seed: 1\n_partial_: true\n", "_partial_"),
    "a header for everyone": bad(CALLBACK, "# @package _global_", "cannot place itself"),
    "a header after a mark": bad("\ufeff" + CALLBACK, "# @package _global_"),
    "a callback of Hydra's": bad(CALLBACK.partition("\n")[2], "_target_"),
    "Hydra's section": bad("hydra: {run: {dir: /tmp/x}}\n", "unknown key"),
    "a group of Hydra's": base("/hydra/callbacks: evil", "names of profiles"),
    "an override of a group": base("override /hydra/launcher: evil", "names of profiles"),
    "a package in the defaults": base("base@_global_", "unknown profile"),
    "an optional base": base("optional base: x", "names of profiles"),
    "a python object": bad("seed: !!python/object:evil_code.Evil {}\n", "tags are refused"),
    "a python call": bad("seed: !!python/object/apply:os.system [id]\n", "tags are refused"),
    "a python module": bad("seed: !!python/module:evil_code\n", "tags are refused"),
    "a tag by its handle": bad(
        "%TAG ! tag:yaml.org,2002:python/\n---\nseed: !object/apply:os.system [id]\n", "tags are"
    ),
}
ENVIRONMENT = {
    "a variable by a resolver": bad("description: ${oc.env:SECRET}\n", "calls no resolver"),
    "a variable in a base": base(
        "other", "calls no resolver", **{"other.yaml": "x: ${oc.env:A}\n"}
    ),
    "a resolver in a list": bad("seed: [1, '${oc.env:SECRET}']\n", "calls no resolver"),
    "a resolver in a name": bad("name: '${oc.env:SECRET}'\n", "calls no resolver"),
    "a cycle of interpolations": bad(
        "name: ${description}\ndescription: ${name}\n", "interpolates"
    ),
    "an interpolation left open": bad('description: "${"\n', "interpolates nothing"),
    "an interpolation in escapes": bad('name: "\\x24{oc.env:SECRET}"\n', "interpolates nothing"),
    "an interpolation, escaped": bad("name: '\\${oc.env:SECRET}'\n", "interpolates nothing"),
    "a missing value": bad("name: ???\n", "missing"),
    **{
        f"the variable {setting}": bad(f"env_extra: {{{setting}}}\n", "dangerous")
        for setting in (
            *("LD_PRELOAD: /tmp/x.so", "PYTHONSTARTUP: x.py", "MPLBACKEND: 'module://evil_code'"),
            *("LOKY_PICKLER: evil_code", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD: 1"),
            *("OPENSSL_ENGINES: x", "NVCC_PREPEND_FLAGS: -ccbin x", "HF_ENDPOINT: 'http://x'"),
            *("MLFLOW_TRACKING_URI: 'http://x'", "MLFLOW_REGISTRY_URL: 'http://x'"),
            *("https_proxy: 'http://x'", "MASTER_ADDR: 192.0.2.1", "AWS_SECRET_ACCESS_KEY: x"),
        )
    },
    "a preload in lower case": bad("env_extra: {ld_preload: /tmp/x.so}\n", "dangerous"),
    "a preload in wide letters": bad("env_extra: {\uff2c\uff24_PRELOAD: x}\n", "not the name"),
    "a preload with a blank": bad("env_extra: {'LD_PRELOAD ': x}\n", "not the name"),
    "a preload and its value": bad("env_extra: {'LD_PRELOAD=/x.so\\nA': x}\n", "not the name"),
    "Python's start-up file in `env`": bad("env: {PYTHONSTARTUP: x.py}\n", "dangerous"),
    "a function that torch imports": bad(
        "env_extra: {TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN: evil_code.function}\n", "dangerous"
    ),
    "a compiler that inductor starts": bad(
        "env_extra: {TORCH_COMPILE_OVERRIDE_INDUCTOR_CONFIGS: '0-99:cpp.cxx=/x'}\n", "dangerous"
    ),
    "a variable that nobody knows": bad("env_extra: {ACME_FLAG: 1}\n", "--allow-env ACME_FLAG"),
    "an allowed variable with a path": bad("env_extra: {NCCL_DEBUG: /tmp/x}\n", "--allow-env"),
}
PATHS = {
    "an absolute base": base("/etc/hostname", "unknown profile"),
    "an absolute YAML file": base("/etc/x.yaml", "unknown profile"),
    "a home": base("~/x", "unknown profile"),
    "a stranger's home": base("~root/x", "unknown profile"),
    "a way up": base("../secrets_here/creds", "unknown profile"),
    "a way up inside": base("a/../../secrets_here/creds", "unknown profile"),
    "a way up from the pack": base("team/../../x", "unknown profile"),
    "a URL": base("'file:///etc/hostname'", "unknown profile"),
    "a Windows path": base("C:\\Windows\\x", "unknown profile"),
    "a backslash": base("..\\x", "unknown profile"),
    "a folder at hand as a package": base("'pkg://secrets_here/creds'", "no such package"),
    "a package without files": base("'pkg://os/..'", "no such package"),
    "a way up from a package": base("'pkg://acme_pack/../../x'", "unknown profile"),
    "a package with a root": base("'pkg:///etc/hostname'", "no such package"),
    "a NUL in a base": base('"a\\0b"', "invisible control character"),
    "a link to a file": Hostile({"bad.yaml": Link("/etc/hostname")}, ("link points outside",)),
    "a link to a secret": Hostile(
        {"bad.yaml": Link("{folder}/secrets_here/creds.yaml")}, ("link",)
    ),
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
    "an anchor that holds itself": bad("a: &a [*a]\n", "anchors and aliases"),
    "a merge key": bad("a: {seed: 1}\n<<: {seed: 2}\n", "a key must be a word"),
    "lists in lists": bad(f"seed: {'[' * 9000}\n", "nested deeper"),
    "braces in braces": bad("{a: " * 9000, "nested deeper"),
    "a list of lists, in lines": bad("- " * 9000 + "x\n", "nested deeper"),
    "a complex key": bad("? " * 9000 + "x\n", "nested deeper"),
    "300 KB": bad("#" * 300_000, "300,000 bytes"),
    "50,000 keys": bad("".join(f"k{n}: 1\n" for n in range(25_000)), "more than 2,000"),
    "a thousand unknown keys": bad("".join(f"k{n}: 1\n" for n in range(990)), "978 more problems"),
    "streams without end": bad(_wide("streams", "s{}: 1"), "more than 2,000"),
    "variables without end": bad(_wide("env_extra", "V{}: a"), "more than 2,000"),
    "patterns without end": bad(_wide("device", "modules: {{p{}: cpu}}", 3), "duplicate key"),
    "ops without end": bad(
        "device: {fallback: {ops: {" + "a, " * 2100 + "}}}\n", "more than 2,000"
    ),
    "a pattern of stars": bad(f"device: {{modules: {{? '{'*a' * 3000}' : cpu}}}}\n", "6,000 chara"),
    "100,000 letters": bad(f"name: {'x' * 100_000}\n", "100,000 characters"),
    "a version of a thousand digits": bad(
        f"requires: {{torch: '>={'9' * 4000}'}}\n", "version range"
    ),
    "a thousand ranges": bad(f"requires: {{torch: '{'>=1,' * 1000}'}}\n", "version range"),
    "a version of escapes": bad('requires: {torch: "===\\e[31m"}\n', "invisible control character"),
    "a base of itself": base("bad", "inherits from itself"),
    "a cycle": base("other", "inherits from itself", **{"other.yaml": "defaults: [bad]\n"}),
    "64 files": Hostile(
        {f"f{n}.yaml": f"defaults: [f{n + 1}]\nseed: 1\n" for n in range(70)}
        | {"f70.yaml": "seed: 1\n"},
        ("more than 64 files",),
        "team/f0",
    ),
    "60 files of 900 keys": Hostile(
        {
            f"f{n}.yaml": f"defaults: [f{n + 1}]\n" + _wide("env_extra", f"V{n}_{{}}: a", 900)
            for n in range(60)
        }
        | {"f60.yaml": "seed: 1\n"},
        ("more than 2,000 keys in the files",),
        "team/f0",
    ),
    "an exponential diamond": Hostile(
        {f"f{n}.yaml": f"defaults: [f{n + 1}, f{n + 1}]\n" for n in range(40)}
        | {"f40.yaml": "seed: 1\n"},
        ("more than 64 files",),
        "team/f0",
    ),
    "an old schema without end": bad(
        "schema: 0\n" + "".join(f"k{n}: 1\n" for n in range(10_000)), "more than 2,000"
    ),
}
VALUES = {
    **{
        f"the seed {seed[:12]}": bad(f"seed: {seed}\n", "0 to 4294967295", "seed = ")
        for seed in (*("9" * 4000, f"0x{'f' * 4000}", "1.0e+400", ".inf", ".nan"),)
    },
    "a negative seed": bad("seed: -1\n", "seed = -1", "out of range"),
    **{
        f"the seed {seed}": bad(f"seed: {seed}\n", f"seed = {seed}", "not a whole number")
        for seed in ("010", "0o10", "0b1", "1:30:00", "2026-11-20")  # numbers in YAML 1.1
    },
    "the seed yes": bad("seed: yes\n", "seed = true", "not a whole number"),
    "a key twice": bad("seed: 1\nseed: 2\n", "duplicate key"),
    "a key twice by escapes": bad('seed: 1\n"\\x73eed": 2\n', "duplicate key"),
    **{
        f"a look-alike: {ascii(text)[:20]}": bad(f"{text}\n", "unknown key")
        for text in (
            *("s\u0435ed: 1", "b\u0430ckends: {}", "backends: {cudnn: {b\u0435nchmark: true}}"),
            *("\uff53\uff45\uff45\uff44: 1", '"se\\u200bed": 1'),  # Cyrillic, wide, zero width
        )
    },
    "a look-alike of a word": bad("dropout: z\u0435ro\n", "not a legal value"),
    "a number in other digits": bad("env: {OMP_NUM_THREADS: '\u0663'}\n", "not a legal value"),
    "a dotted key": bad("env.LD_PRELOAD: x\n", "unknown key"),
    **{
        f"what steers a terminal: {text}": bad(f"{text}\n", "invisible control character")
        for text in (
            *('description: "\\e[31mred"', 'name: "\\e]8;;http://x\\e\\\\y"', '"\\e[2Jseed": 1'),
            *('description: "\\u202egnp.exe"', 'name: "good\\rbad"'),
        )
    },
    "half a character": bad('name: "\\ud800"\n', "invalid Unicode"),
    "NUL": bad("seed: 1\0\n", "NUL bytes"),
    "UTF-16": bad("seed: 1\n".encode("utf-16"), "not UTF-8"),
    "a tab": bad("env:\n\tA: b\n", "YAML syntax error"),
    "what marks a refusal": bad("refused: all is well\n", "unknown key"),
    "what marks a refusal, as a list": bad("refused: [1]\n", "unknown key"),
    "a newer schema": bad("schema: 99\n", "newer torchrepro"),
    "an older schema, dangerous": bad("schema: 0\nLD_PRELOAD: /x.so\n", "unknown key"),
    "a second document": bad("seed: 1\n---\nseed: 2\n", "second YAML document"),
}
ENTRY_POINTS = {
    "a module of Python's": named(GROUP + "team = os:system\n", NOT_FOUND),
    "a way up as a package": named(GROUP + "team = ..\n", NOT_FOUND),
    "a way up behind a package": named(GROUP + "team = acme_pack:../../etc\n", NOT_FOUND),
    "an absolute package": named(GROUP + "team = /etc\n", NOT_FOUND),
    "a package with NUL": named(GROUP + "team = acme_pack\0\n", NOT_FOUND),
    "a look-alike of a package": named(GROUP + "team = \u0430cme_pack\n", NOT_FOUND),
    "a line without a value": named(GROUP + "team\n", *UNREADABLE),
    "a broken line of another group": named(GROUP + "team = acme_pack\n[others]\nx\n", *UNREADABLE),
    "an empty value": named(GROUP + "team =\n", NOT_FOUND),
    "a package of others": named(GROUP + "team = yaml\n", NOT_ITS_OWN),
    "torchrepro itself": named(GROUP + "team = torchrepro:conf.repro\n", NOT_ITS_OWN),
    "a folder at hand": named(GROUP + "team = secrets_here\n", NOT_ITS_OWN, named="team/creds"),
    "a folder at hand, for editing": named(
        GROUP + "team = secrets_here\n",
        NOT_ITS_OWN,
        named="team/creds",
        files={"/acme_pack-1.0.dist-info/direct_url.json": EDITED},
    ),
    "a pack called with": named(GROUP + "with = acme_pack\n", "unknown profile", named="with/bad"),
    "a pack called ..": named(GROUP + "../team = acme_pack\n", "unknown"),
    "half a million packs": named(
        GROUP + "team = acme_pack\n" + "".join(f"k{n} = acme_pack\n" for n in range(500_000)),
        *UNREADABLE,
    ),
    "more packs than anybody means": named(
        GROUP + "team = acme_pack\n" + "".join(f"k{n} = acme_pack\n" for n in range(16)),
        "more than 16 packs",
    ),
    "as many packs as can be read": named(
        GROUP + "team = acme_pack\n" + "".join(f"k{n} = a\n" for n in range(9_000)),
        "more than 16 packs",
    ),
    "entry points that are no text": named(b"[torchrepro.profiles]\nteam = \xff\n", "unknown"),
    "metadata with colours": named(
        None,
        "evil\\x1b[31m",
        files={"bad.yaml": "sede: 1\n"},
        metadata="Metadata-Version: 2.1\nName: evil\x1b[31m\nVersion: 1\x1b[31m\n",
    ),
    "metadata that is no text": named(
        None, "without a name", files={"bad.yaml": "sede: 1\n"}, metadata=b"Name: \xff\n"
    ),
    "a version that is none": named(
        None,
        "installed",
        files={"bad.yaml": "requires: {acme-pack: '>=1'}\n"},
        metadata="Metadata-Version: 2.1\nName: acme-pack\nVersion: x y\n",
    ),
}
HOSTILE = {**CODE, **ENVIRONMENT, **PATHS, **BOMBS, **VALUES, **ENTRY_POINTS}
