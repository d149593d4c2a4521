"""The commands about profiles. Each calls one function of the package and prints the result."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from torchrepro.cli.app import (
    IMPORTING,
    Texts,
    answer,
    command,
    doing,
    print_json,
    resolved_profile,
)
from torchrepro.ground.console import listing, say, table
from torchrepro.ground.errors import ProfileError, shown
from torchrepro.profile.resolved import flatten, plain

if TYPE_CHECKING:
    from torchrepro.ground.console import Part


@command("list")
def list_profiles(*, as_json: bool = False, only_pieces: bool = False) -> None:
    """Show the profiles on the search path, with their guarantee and origin."""
    from torchrepro.profile.load import PIECE, PROFILE, listed
    from torchrepro.profile.search_path import VARIABLE, missing_folders

    listed_kind = PIECE if only_pieces else PROFILE
    entries = [entry for entry in listed() if entry.kind == listed_kind]
    rows = [(e.name, e.guarantee, e.origin, e.description) for e in entries]
    headings = (listed_kind, "guarantee", "origin", "purpose")
    answer([e.to_json() for e in entries], [table(headings, rows)], as_json=as_json)
    for folder in missing_folders():
        say(f"note: {VARIABLE} names {shown(folder)}, which is not a folder")


@command("show")
def show_profile(
    profile: str,
    overrides: Texts = None,
    allow_env: Texts = None,
    *,
    as_json: bool = False,
    origin: bool = False,
) -> None:
    """Show the resolved profile, and what would lower its guarantee on this machine."""
    from torchrepro.application.planner import make_plan

    resolved = resolved_profile(profile, overrides)
    if origin:
        rows, cells = [], []
        for key, value in flatten(resolved.values).items():
            origin_json = resolved.origins[key].to_json()
            set_by = origin_json.pop("set_by")
            row = {"key": key, "value": plain(value), "origin": set_by, **origin_json}
            rows.append(row)
            replaced = ", ".join(
                f"{shown(old['value'])} ({old['set_by']})"
                for old in row["replaced"]
                if old["value"] != row["value"]
            )
            cells.append((key, shown(row["value"]), row["origin"], row["package"], replaced))
        headings = ("key", "value", "set by", "package", "replaced")
        answer(rows, [table(headings, cells)], as_json=as_json)
    elif as_json:
        print_json(plain(resolved.values))
    else:
        import yaml

        sys.stdout.write(f"# {resolved.digest}\n")
        guarantee = make_plan(resolved, closed={}).report.guarantee
        if guarantee.lowered:
            sys.stdout.write(f"# {guarantee}\n")
        dumped = yaml.safe_dump(plain(resolved.values), sort_keys=False, allow_unicode=True)
        sys.stdout.write(dumped)


@command("plan")
def plan_profile(
    profile: str, overrides: Texts = None, allow_env: Texts = None, *, as_json: bool = False
) -> None:
    """Show what the profile would set if it were applied at the start of a program."""
    from torchrepro.application.planner import make_plan
    from torchrepro.ground.imports import import_torch
    from torchrepro.reporting.process_state import closed_latches
    from torchrepro.reporting.report import headline_parts, knob_parts

    resolved = resolved_profile(profile, overrides)
    closed = closed_latches()  # before torch is imported, as at the start of a program
    with doing(IMPORTING):
        import_torch()
    report = make_plan(resolved, closed=closed).report
    answer(report.to_json(), [*headline_parts(report), *knob_parts(report)], as_json=as_json)


def _in_shell(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _in_dotenv(variables: Mapping[str, str]) -> str:
    """Return lines of a .env file. Quotes keep programs and shells from expanding a value."""
    lines = []
    for name, value in variables.items():
        if any(letter in value for letter in "'\\") or not value.isprintable():
            problem = "has a character that programs read differently in .env files"
            raise _unwritable(name, value, problem)
        plain = all(letter.isalnum() or letter in "_-.,:;/+@%=[]" for letter in value)
        lines.append(f'{name}="{value}"\n' if plain else f"{name}='{value}'\n")
    return "".join(lines)


def _in_docker(variables: Mapping[str, str]) -> str:
    """Return lines for `docker run --env-file`, without quotes: Docker would keep quotes.

    https://docs.docker.com/reference/cli/docker/container/run/#env
    """
    for name, value in variables.items():
        if len(value.splitlines()) > 1 or value.endswith(("\n", "\r")):
            raise _unwritable(name, value, "has a line end, which an --env-file cannot contain")
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _in_slurm(variables: Mapping[str, str]) -> str:
    """Return lines for a job script. They belong after the #SBATCH lines of the script.

    `sbatch --export=NAME=value` would cut a value at a comma. After `--export=NONE`, `srun` would
    start tasks without the variables of the script: https://slurm.schedmd.com/srun.html.
    """
    return _in_shell(variables) + "export SLURM_EXPORT_ENV=ALL\n"


def _in_k8s(variables: Mapping[str, str]) -> str:
    """Return the `env` list of a container in a pod's YAML, in which `$$` means `$`.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables
    """
    lines = ["env:\n"]
    for name, value in variables.items():
        quoted = json.dumps(value.replace("$", "$$"), ensure_ascii=False)
        # JSON's escapes are not enough: YAML has no surrogate pairs, and reads U+0085, U+2028 and
        # U+2029 as line ends.
        text = "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in quoted)
        lines.append(f"  - name: {name}\n    value: {text}\n")
    return "".join(lines)


def _unwritable(name: str, value: str, problem: str) -> ProfileError:
    todo = "use --format sh or --format json"
    return ProfileError.about(problem, key=name, found=shown(value), todo=todo)


EnvFormat = StrEnum("EnvFormat", "SH DOTENV JSON DOCKER SLURM K8S")

WRITERS: dict[EnvFormat, Callable[[Mapping[str, str]], str]] = {
    EnvFormat.SH: _in_shell,
    EnvFormat.DOTENV: _in_dotenv,
    EnvFormat.JSON: lambda all_: json.dumps(dict(all_), indent=2, ensure_ascii=False) + "\n",
    EnvFormat.DOCKER: _in_docker,
    EnvFormat.SLURM: _in_slurm,
    EnvFormat.K8S: _in_k8s,
}
"""The writer of each format. The program that reads the text gets exactly the given values.

A writer raises `ProfileError` for a value that its format cannot represent.
"""


@command("env")
def show_environment(
    profile: str,
    overrides: Texts = None,
    allow_env: Texts = None,
    form: EnvFormat = EnvFormat.SH,
    *,
    as_json: bool = False,
) -> None:
    """Print the profile's variables, for a job script, a container or a shell."""
    variables = resolved_profile(profile, overrides).environment()
    sys.stdout.write(WRITERS[EnvFormat.JSON if as_json else form](variables))


@command("explain")
def explain_name(name: str = "", *, as_json: bool = False) -> None:
    """Explain a cause that a verdict names, or a knob. Without NAME, list all causes.

    The page of a cause has a program that shows it, its verdict, and the fix. For a knob: what it
    does, until when it can be set, its cost, and its documentation.
    """
    from torchrepro.knobs.catalogue import explanations
    from torchrepro.verdict.cause_pages import cause_pages

    pages = cause_pages()
    if name in pages or not name:
        chosen = [pages[name]] if name else [*pages.values()]
        rows = [(page.cause_id, page.title) for page in chosen]
        listed = pages[name].text if name else table(["cause", "what it is"], rows)
        answer([page._asdict() for page in chosen], [listed], as_json=as_json)
        return
    explained = explanations(name, tuple(pages))
    shown: list[Part] = []
    for explanation in explained:
        rows = [(f"  {k}", text) for k, text in explanation.items() if text and k != "knob"]
        shown += [explanation["knob"], listing(rows)]
    answer(explained, shown, as_json=as_json)


@command("doctor")
def examine_machine(
    profile: str = "debug-strict",
    overrides: Texts = None,
    allow_env: Texts = None,
    *,
    as_json: bool = False,
) -> None:
    """List problems on this machine that would make a profile ineffective; exit 1 if any exist."""
    from torchrepro.doctor import examine

    resolved = resolved_profile(profile, overrides)
    with doing(IMPORTING):
        findings = examine(resolved)
    serious = [finding for finding in findings if finding.serious]
    obstacles = f"{len(serious)} thing{'s' * (len(serious) > 1)}" if serious else "nothing"
    lines = [f"{obstacles} on this machine would keep {resolved.name} from taking effect"]
    for finding in findings:
        lines.append(f"  {'!' if finding.serious else '-'} {finding.what}")
        lines += [f"      to do: {finding.to_do}"] * bool(finding.to_do)
    document = {
        "profile": resolved.name,
        "effective": not serious,
        "findings": [asdict(finding) for finding in findings],
    }
    answer(document, lines, as_json=as_json)
    raise typer.Exit(1 if serious else 0)


@command("schema")
def show_schema() -> None:
    """Print the JSON Schema of a profile, for editors."""
    from torchrepro.profile.schema import json_schema

    print_json(json_schema())


@command("quickstart")
def quickstart(folder: Path = Path(), *, as_json: bool = False) -> None:
    """Write a small program and a profile to try torchrepro on, and show what to run next."""
    from torchrepro.scaffold import write_quickstart

    files, commands = write_quickstart(folder)
    document = {
        "files": [str(path) for path in files],
        "next": [{"command": line, "what": purpose} for line, purpose in commands.items()],
    }
    lines = [f"wrote {' and '.join(map(str, files))}; next:"]
    for line, purpose in commands.items():
        lines += ["", f"  # {purpose}", f"  {line}"]
    answer(document, lines, as_json=as_json)


@command("new-pack")
def new_pack(name: str, *, as_json: bool = False) -> None:
    """Write a Python package of profiles, with tests and ready to publish, into a new folder."""
    from torchrepro.scaffold import write_pack

    pack = write_pack(Path(name))
    document = {
        "folder": str(pack.folder),
        "name": pack.name,
        "distribution": pack.distribution,
        "profiles": list(pack.profiles),
        "files": list(pack.files),
    }
    folder = pack.folder if pack.folder.is_absolute() else f"./{pack.folder}"
    lines = [
        f"wrote the pack {pack.name} to {pack.folder}/:",
        *(f"  {path}" for path in pack.files),
        "next:",
        f'  pip install -e "{folder}[test]"',
        f"  pytest {pack.folder}",
        f"  python train.py +repro={pack.name}/strict",
    ]
    answer(document, lines, as_json=as_json)
