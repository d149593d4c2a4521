"""The commands; each calls one function of the package and prints what it returns."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrepro.errors import Problem, ProfileError, shown

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved

app = typer.Typer(
    help="Reproducible PyTorch runs from one declared profile.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _complete(incomplete: str) -> list[str]:
    from torchrepro.profile.find import search_path

    names = {name for folder in search_path() for name in folder.names()}
    return sorted(name for name in names if name.startswith(incomplete))


ProfileName = Annotated[
    str,
    typer.Argument(
        metavar="PROFILE",
        help="A name on the search path, a path to a YAML file, or pkg://package.path/name.",
        autocompletion=_complete,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDE", help="As in seed=7 or backends.cudnn.benchmark=false."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _resolved(profile: str, overrides: list[str] | None) -> Resolved:
    from torchrepro.profile.load import load

    for text in overrides or ():
        if "=" not in text and not text.startswith("~"):
            raise ProfileError(
                Problem(
                    "not an override; one profile at a time",
                    found=text,
                    todo="write key=value, or a profile that inherits both: "
                    f"defaults: [{profile}, {text}, _self_]",
                )
            )
    return load(profile, overrides or ()).resolved


@app.command("list")
def list_profiles(as_json: Json = False) -> None:  # noqa: FBT002 - an option of the command line
    """Show the profiles on the search path, with their guarantee and origin."""
    from torchrepro.profile.listing import listed

    entries = listed()
    if as_json:
        _print_json([entry.to_json() for entry in entries])
        return
    from torchrepro.tables import show, table

    rows = [(e.name, e.guarantee, e.origin, e.description) for e in entries]
    show(table(("profile", "guarantee", "origin", "what it is for"), rows))


@app.command("show")
def show_profile(
    profile: ProfileName,
    overrides: Overrides = None,
    as_json: Json = False,  # noqa: FBT002
    origin: Annotated[  # noqa: FBT002
        bool, typer.Option("--origin", help="Say which file or override set each value.")
    ] = False,
) -> None:
    """Show the resolved profile."""
    resolved = _resolved(profile, overrides)
    if origin:
        _show_origins(profile, overrides or [], resolved, as_json=as_json)
    elif as_json:
        _print_json(json.loads(json.dumps(dict(resolved.values), default=dict)))
    else:
        import yaml

        plain = json.loads(json.dumps(dict(resolved.values), default=dict))
        sys.stdout.write(f"# {resolved.digest}\n")
        sys.stdout.write(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _show_origins(profile: str, overrides: list[str], resolved: Resolved, *, as_json: bool) -> None:
    from torchrepro.profile.compose import compose, flatten

    composition = compose(profile, overrides)
    rows = [
        {"key": key, "value": value, "origin": composition.place(key) or "the file's name"}
        for key, value in flatten(resolved.values).items()
    ]
    if as_json:
        _print_json(rows)
        return
    from torchrepro.tables import show, table

    cells = [(row["key"], shown(row["value"]), row["origin"]) for row in rows]
    show(table(("key", "value", "set by"), cells))


@app.command("plan")
def plan_profile(
    profile: ProfileName,
    overrides: Overrides = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Show what putting the profile in force at the start of a program would do."""
    from torchrepro.planner import make_plan, observe
    from torchrepro.process import closed_doors

    resolved = _resolved(profile, overrides)
    closed = closed_doors()  # as a program finds them that has not imported torch yet
    _import_torch()
    report = make_plan(resolved, observe(resolved, closed=closed)).report
    if as_json:
        _print_json(report.to_json())
        return
    from torchrepro.tables import report_table, show

    show(report_table(report), report.summary)


def _import_torch() -> None:
    from torchrepro.errors import ApplyError

    try:
        import_module("numpy.random")
        import_module("torch")
    except (ImportError, RuntimeError) as error:
        words = str(error).partition("\n")[0]
        raise ApplyError(
            f"torch cannot be imported: {words}\n  `torchrepro doctor` says more"
        ) from None


@app.command("run", options_metavar="[OPTIONS]", epilog="The command stands after `--`.")
def run_command(context: typer.Context, profile: ProfileName, overrides: Overrides = None) -> None:
    """Start a command with the profile in force from before Python starts.

    It is in force in COMMAND and in every Python process that COMMAND starts, unless one replaces
    PYTHONPATH or starts Python with -I, -E or -S.
    """
    from torchrepro.launch import start

    if not context.obj:
        raise ProfileError(
            Problem(
                "no command to start",
                todo=f"write it after `--`: torchrepro run {profile} -- python train.py",
            )
        )
    start(_resolved(profile, overrides), context.obj)


class EnvFormat(StrEnum):
    """How variables are written."""

    SH = "sh"
    DOTENV = "dotenv"
    JSON = "json"


@app.command("env")
def show_environment(
    profile: ProfileName,
    overrides: Overrides = None,
    form: Annotated[EnvFormat, typer.Option("--format", help="How to write them.")] = EnvFormat.SH,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Print the profile's variables, for a job script, a container or a shell."""
    import shlex

    variables = _resolved(profile, overrides).environment()
    if as_json or form is EnvFormat.JSON:
        _print_json(variables)
        return
    for name, value in variables.items():
        if form is EnvFormat.SH:
            sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
        else:
            sys.stdout.write(f"{name}={json.dumps(value)}\n")


@app.command("explain")
def explain_knob(
    knob: Annotated[str, typer.Argument(metavar="KNOB", help="As reports call it, or an alias.")],
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say what a knob does, when it latches, what it costs, and where that is written."""
    from torchrepro.knobs.explain import explanations

    found = explanations(knob)
    if as_json:
        _print_json(found)
        return
    from torchrepro.tables import listing, show

    for entry in found:
        rows = [(label, text) for label, text in entry.items() if text and label != "knob"]
        show(entry["knob"], listing([("  " + label, text) for label, text in rows]))


@app.command("doctor")
def examine_machine(
    profile: ProfileName = "debug-strict",
    overrides: Overrides = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say what on this machine would make a profile ineffective; exit 1 if something would."""
    from torchrepro.doctor import examine

    resolved = _resolved(profile, overrides)
    findings = examine(resolved)
    serious = [finding for finding in findings if finding.serious]
    if as_json:
        _print_json(
            {
                "profile": resolved.name,
                "effective": not serious,
                "findings": [finding.to_json() for finding in findings],
            }
        )
    else:
        things = f"{len(serious)} thing{'s' * (len(serious) > 1)}"
        verdict = f"{things} would make" if serious else "nothing here makes"
        verdict += f" {resolved.name} ineffective"
        sys.stdout.write(f"{verdict}\n")
        for finding in findings:
            mark = "!" if finding.serious else "-"
            sys.stdout.write(f"  {mark} {finding.what}\n")
            if finding.todo:
                sys.stdout.write(f"      to do: {finding.todo}\n")
    raise typer.Exit(1 if serious else 0)


@app.command("diff")
def show_differences(
    left: Annotated[str, typer.Argument(metavar="A", help="A profile or a manifest.")],
    right: Annotated[str, typer.Argument(metavar="B", help="A profile or a manifest.")],
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Compare two profiles or manifests value by value; exit 1 if they differ."""
    from torchrepro.profile.difference import differences

    found = differences(_profile_or_manifest(left), _profile_or_manifest(right))
    if left.endswith(".json") and right.endswith(".json"):
        from torchrepro.manifest import differing_seeding_calls

        found += differing_seeding_calls(Path(left), Path(right))
    if as_json:
        rows = [{"key": d.key, "left": d.left, "right": d.right} for d in found]
        _print_json({"same": not found, "differences": rows})
    elif not found:
        sys.stdout.write("the same\n")
    else:
        from torchrepro.tables import show, table

        show(table(("key", left, right), [(d.key, shown(d.left), shown(d.right)) for d in found]))
    raise typer.Exit(1 if found else 0)


def _profile_or_manifest(name: str) -> Resolved:
    if not name.endswith(".json"):
        return _resolved(name, None)
    from torchrepro.manifest import read_manifest

    return read_manifest(Path(name))


@app.command("schema")
def show_schema() -> None:
    """Print the JSON Schema of a profile, for editors."""
    from torchrepro.profile.json_schema import json_schema

    _print_json(json_schema())
