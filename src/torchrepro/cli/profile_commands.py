"""The commands about profiles; each calls one function of the package and prints its answer."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrepro.cli.app import Json, Overrides, ProfileName, app, print_json, resolved_profile
from torchrepro.errors import shown

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved


@app.command("list")
def list_profiles(as_json: Json = False) -> None:  # noqa: FBT002 - an option of the command line
    """Show the profiles on the search path, with their guarantee and origin."""
    from torchrepro.profile.listing import listed

    entries = listed()
    if as_json:
        print_json([entry.to_json() for entry in entries])
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
    resolved = resolved_profile(profile, overrides)
    if origin:
        _show_origins(profile, overrides or [], resolved, as_json=as_json)
    elif as_json:
        print_json(json.loads(json.dumps(dict(resolved.values), default=dict)))
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
        print_json(rows)
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

    resolved = resolved_profile(profile, overrides)
    closed = closed_doors()  # as a program finds them that has not imported torch yet
    _import_torch()
    report = make_plan(resolved, observe(resolved, closed=closed)).report
    if as_json:
        print_json(report.to_json())
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

    variables = resolved_profile(profile, overrides).environment()
    if as_json or form is EnvFormat.JSON:
        print_json(variables)
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
        print_json(found)
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

    resolved = resolved_profile(profile, overrides)
    findings = examine(resolved)
    serious = [finding for finding in findings if finding.serious]
    if as_json:
        print_json(
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
        print_json({"same": not found, "differences": rows})
    elif not found:
        sys.stdout.write("the same\n")
    else:
        from torchrepro.tables import show, table

        show(table(("key", left, right), [(d.key, shown(d.left), shown(d.right)) for d in found]))
    raise typer.Exit(1 if found else 0)


def _profile_or_manifest(name: str) -> Resolved:
    if not name.endswith(".json"):
        return resolved_profile(name, None)
    from torchrepro.manifest import read_manifest

    return read_manifest(Path(name))


@app.command("schema")
def show_schema() -> None:
    """Print the JSON Schema of a profile, for editors."""
    from torchrepro.profile.json_schema import json_schema

    print_json(json_schema())
