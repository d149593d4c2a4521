"""The public names of the package, each documented by its docstring."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING

import torchrepro

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ANSWERS = ("verdict.value", "verification.result")
"""Modules whose public classes are all found in answers."""

PARTS = (
    "reporting.outcomes.KnobRow",
    "reporting.outcomes.Guarantee",
    "reporting.outcomes.Lowered",
    "reporting.outcomes.KnobChange",
    "reporting.outcomes.Writer",
    "policies.policy.PolicyEffect",
    "seeding.call_records.ObservedCall",
    "application.planner.Step",
    "ground.errors.Problem",
)
"""Other classes whose values are found in answers, and which nobody makes or imports by name."""

CONSTRUCTED = ("Checkpoint",)
"""The public classes that a caller makes; the others are answers."""

BY_KEYS = {"Profile": "Its fields are the [keys of a profile](profile-keys.md)."}
"""Public classes whose members have a page of their own, with the words that lead there."""


_FIELDS = ("members", "undoc-members", "exclude-members: __init__,__new__")
"""What is shown of a class that a caller never makes: every field and method."""


def public_names() -> str:
    """Return the documentation of every public name: functions, classes, exceptions."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": []}
    for name in torchrepro.__all__:
        value = getattr(torchrepro, name)
        if not inspect.isclass(value):
            kinds["Functions"].append(_directive(f".. autofunction:: torchrepro.{name}"))
        elif issubclass(value, Exception):
            kinds["Exceptions"].append(
                _directive(f".. autoexception:: torchrepro.{name}", *_FIELDS, "show-inheritance")
            )
        elif name in BY_KEYS:
            entry = _directive(
                f".. autoclass:: torchrepro.{name}", "exclude-members: __init__,__new__"
            )
            kinds["Classes"] += [entry, BY_KEYS[name]]
        else:
            options = _FIELDS[:2] if name in CONSTRUCTED else _FIELDS
            kinds["Classes"].append(_directive(f".. autoclass:: torchrepro.{name}", *options))
    return "\n\n".join(f"## {kind}\n\n" + "\n\n".join(entries) for kind, entries in kinds.items())


def parts_of_answers() -> str:
    """Return the documentation of the classes that are found in answers."""
    names = [name for module in ANSWERS for name in _classes(module)]
    return "\n\n".join(
        _directive(f".. autoclass:: torchrepro.{name}", *_FIELDS) for name in (*PARTS, *names)
    )


def _classes(module: str) -> list[str]:
    """Return the classes that a module defines, without those that have a public name."""
    found = vars(import_module(f"torchrepro.{module}")).values()
    names = [
        each.__name__
        for each in found
        if inspect.isclass(each) and each.__module__ == f"torchrepro.{module}"
    ]
    return [f"{module}.{name}" for name in names if name not in torchrepro.__all__]


def _directive(line: str, *options: str) -> str:
    """Return a directive of reStructuredText as Markdown takes it."""
    fields = [f"   :{name}:{value}" for name, _, value in (o.partition(":") for o in options)]
    return "\n".join(["```{eval-rst}", line, *fields, "```"])


def link_short_names(
    app: Sphinx, env: BuildEnvironment, node: Element, contents: Element
) -> Element | None:
    """Link a class that a type hint names without its own module, if only one is called so.

    Type hints of names that are imported for type checkers alone cannot be evaluated.
    """
    module, _, name = node.get("reftarget", "").rpartition(".")
    if module and name not in torchrepro.__all__:
        return None
    objects = env.domains.python_domain.objects
    found = [known for known in objects if known.endswith(f".{name}")]
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    document = node.get("refdoc", env.docname)
    return env.domains.python_domain.resolve_xref(
        env, document, app.builder, "obj", found[0], node, contents
    )


def drop_words_of_python(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Take away what Python itself says of a field of a named tuple, which is its number."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
