"""The commands about profiles; each calls one function of the package and prints its answer."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrepro.cli.app import (
    IMPORTING,
    AllowEnv,
    Json,
    Overrides,
    ProfileName,
    answer,
    command,
    doing,
    print_json,
    resolved_profile,
)
from torchrepro.ground.console import listing, say, table
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import shown
from torchrepro.profile.resolved import flatten, plain

if TYPE_CHECKING:
    from torchrepro.ground.console import Part


@command("list")
def list_profiles(
    as_json: Json = False,  # noqa: FBT002 - an option of the command line
    only_pieces: Annotated[  # noqa: FBT002
        bool, typer.Option("--pieces", help="Show what can be laid on top of profiles instead.")
    ] = False,
) -> None:
    """Show the profiles on the search path, with their guarantee and origin."""
    from torchrepro.profile.load import PIECE, PROFILE, listed
    from torchrepro.profile.search_path import VARIABLE, missing_folders

    kind = PIECE if only_pieces else PROFILE
    entries = [entry for entry in listed() if entry.kind == kind]
    rows = [(e.name, e.guarantee, e.origin, e.description) for e in entries]
    headings = (kind, "guarantee", "origin", "what it is for")
    answer([e.to_json() for e in entries], [table(headings, rows)], as_json=as_json)
    for folder in missing_folders():
        say(f"note: {VARIABLE} names {shown(folder)}, which is no folder")


@command("show")
def show_profile(
    profile: ProfileName,
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    as_json: Json = False,  # noqa: FBT002
    origin: Annotated[  # noqa: FBT002
        bool, typer.Option("--origin", help="Say which file or override set each value.")
    ] = False,
) -> None:
    """Show the resolved profile, and what its guarantee leaves open if it is put in force here."""
    from torchrepro.application.planner import make_plan

    resolved = resolved_profile(profile, overrides)
    if origin:
        rows, cells = [], []
        for key, value in flatten(resolved.values).items():
            its = resolved.origins[key].to_json()
            row = {"key": key, "value": plain(value), "origin": its.pop("set_by"), **its}
            rows.append(row)
            others = [each for each in row["replaced"] if each["value"] != row["value"]]
            replaced = ", ".join(f"{shown(each['value'])} ({each['set_by']})" for each in others)
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
    profile: ProfileName,
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Show what putting the profile in force at the start of a program would do."""
    from torchrepro.application.planner import make_plan
    from torchrepro.ground.imports import import_torch
    from torchrepro.reporting.process_state import closed_doors
    from torchrepro.reporting.report import headline_parts, knob_parts

    resolved = resolved_profile(profile, overrides)
    closed = closed_doors()  # as a program finds them that has not imported torch yet
    with doing(IMPORTING):
        import_torch()
    report = make_plan(resolved, closed=closed).report
    answer(report.to_json(), [*headline_parts(report), *knob_parts(report)], as_json=as_json)


def _in_shell(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _in_dotenv(variables: Mapping[str, str]) -> str:
    """Return lines whose quotes keep every reader of such files, a shell too, from replacing."""
    lines = []
    for name, value in variables.items():
        if any(letter in value for letter in "'\\") or not value.isprintable():
            what = "a character that programs read differently in .env files"
            raise _unwritable(name, value, what)
        plain = all(letter.isalnum() or letter in "_-.,:;/+@%=[]" for letter in value)
        lines.append(f'{name}="{value}"\n' if plain else f"{name}='{value}'\n")
    return "".join(lines)


def _in_docker(variables: Mapping[str, str]) -> str:
    """Return the lines of a file for `docker run --env-file`, which takes quotes as they are.

    https://docs.docker.com/reference/cli/docker/container/run/#env
    """
    for name, value in variables.items():
        if len(value.splitlines()) > 1 or value.endswith(("\n", "\r")):
            raise _unwritable(name, value, "a line end, which an --env-file has no way to write")
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _in_slurm(variables: Mapping[str, str]) -> str:
    """Return lines for a job script, to stand after its #SBATCH lines.

    A value with a comma is cut in `--export=NAME=value`, and `srun` starts its tasks without the
    script's own variables under `--export=NONE`: https://slurm.schedmd.com/srun.html.
    """
    return _in_shell(variables) + "export SLURM_EXPORT_ENV=ALL\n"


def _in_k8s(variables: Mapping[str, str]) -> str:
    """Return the `env` list of a container in a pod's YAML, in which `$$` stands for `$`.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables
    """
    lines = ["env:\n"]
    for name, value in variables.items():
        quoted = json.dumps(value.replace("$", "$$"), ensure_ascii=False)
        # JSON's own escapes would not do for the rest: YAML has no surrogate pairs, and takes
        # U+0085, U+2028 and U+2029 for ends of a line.
        text = "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in quoted)
        lines.append(f"  - name: {name}\n    value: {text}\n")
    return "".join(lines)


def _unwritable(name: str, value: str, what: str) -> ProfileError:
    todo = "use --format sh or --format json"
    return ProfileError.about(what, key=name, found=shown(value), todo=todo)


EnvFormat = StrEnum("EnvFormat", "SH DOTENV JSON DOCKER SLURM K8S")  # what reads the variables

WRITERS: dict[EnvFormat, Callable[[Mapping[str, str]], str]] = {
    EnvFormat.SH: _in_shell,
    EnvFormat.DOTENV: _in_dotenv,
    EnvFormat.JSON: lambda all_: json.dumps(dict(all_), indent=2, ensure_ascii=False) + "\n",
    EnvFormat.DOCKER: _in_docker,
    EnvFormat.SLURM: _in_slurm,
    EnvFormat.K8S: _in_k8s,
}
"""How variables are written for what starts a program: each text gives it the very values.

A writer raises `ProfileError` for a value that its format cannot hold.
"""


@command("env")
def show_environment(
    profile: ProfileName,
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    form: Annotated[
        EnvFormat, typer.Option("--format", help="What is to read them.")
    ] = EnvFormat.SH,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Print the profile's variables, for a job script, a container or a shell."""
    variables = resolved_profile(profile, overrides).environment()
    sys.stdout.write(WRITERS[EnvFormat.JSON if as_json else form](variables))


@command("explain")
def explain_knob(
    knob: Annotated[str, typer.Argument(metavar="KNOB", help="As reports call it, or an alias.")],
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say what a knob does, until when it can be set, what it costs, and where that is written."""
    from torchrepro.knobs.catalogue import explanations

    found = explanations(knob)
    shown: list[Part] = []
    for entry in found:
        rows = [(f"  {k}", text) for k, text in entry.items() if text and k != "knob"]
        shown += [entry["knob"], listing(rows)]
    answer(found, shown, as_json=as_json)


@command("doctor")
def examine_machine(
    profile: ProfileName = "debug-strict",
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say what on this machine would make a profile ineffective; exit 1 if something would."""
    from torchrepro.doctor import examine

    resolved = resolved_profile(profile, overrides)
    with doing(IMPORTING):
        findings = examine(resolved)
    serious = [finding for finding in findings if finding.serious]
    things = f"{len(serious)} thing{'s' * (len(serious) > 1)}"
    verdict = f"{things} on this machine would" if serious else "nothing on this machine would"
    lines = [f"{verdict} keep {resolved.name} from taking effect"]
    for finding in findings:
        lines.append(f"  {'!' if finding.serious else '-'} {finding.what}")
        lines += [f"      to do: {finding.to_do}"] * bool(finding.to_do)
    found = {
        "profile": resolved.name,
        "effective": not serious,
        "findings": [asdict(finding) for finding in findings],
    }
    answer(found, lines, as_json=as_json)
    raise typer.Exit(1 if serious else 0)


@command("schema")
def show_schema() -> None:
    """Print the JSON Schema of a profile, for editors."""
    from torchrepro.profile.schema import json_schema

    print_json(json_schema())


@command("quickstart")
def quickstart(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write; it is made if it is not there.")
    ] = Path(),
    as_json: Json = False,  # noqa: FBT002 - an option of the command line
) -> None:
    """Write a small program and a profile of your own, and say what to run next."""
    from torchrepro.scaffold import write_quickstart

    files, commands = write_quickstart(folder)
    found = {
        "files": [str(path) for path in files],
        "next": [{"command": line, "what": what} for line, what in commands.items()],
    }
    lines = [f"wrote {' and '.join(map(str, files))}; next:"]
    for line, what in commands.items():
        lines += ["", f"  # {what}", f"  {line}"]
    answer(found, lines, as_json=as_json)


@command("new-pack")
def new_pack(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The pack, or the path of its new folder.")
    ],
    as_json: Json = False,  # noqa: FBT002 - an option of the command line
) -> None:
    """Write a package of profiles that is tested and ready to publish into the new folder NAME."""
    from torchrepro.scaffold import write_pack

    pack = write_pack(Path(name))
    found = {
        "folder": str(pack.folder),
        "name": pack.name,
        "distribution": pack.distribution,
        "profiles": list(pack.profiles),
        "files": list(pack.files),
    }
    folder = pack.folder if pack.folder.is_absolute() else f"./{pack.folder}"
    lines = [
        f"{pack.folder}/ holds the pack {pack.name}:",
        *(f"  {path}" for path in pack.files),
        "next:",
        f'  pip install -e "{folder}[test]"',
        f"  pytest {pack.folder}",
        f"  python train.py +repro={pack.name}/strict",
    ]
    answer(found, lines, as_json=as_json)
