"""Which environment variables a profile may set by itself, and which need somebody's consent.

A profile is data from others. The variables of the catalogue and of the allow list cannot choose
code or hosts. Any other one is set only with the consent of the user who starts the run, given by
its name or by an override that sets it. The schema refuses dangerous variables in any case.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.variables import allowed, refusal
from torchrepro.messages import Problem, near, shown
from torchrepro.profile.composition import EXTRA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.profile.composition import Composition

VARIABLE = "TORCHREPRO_ALLOW_ENV"
"""Variable with the names, separated by commas, that the user who starts the run consents to.

No profile can set it, nor any other variable of torchrepro.
"""

OPTION = "--allow-env"


def allowed_by(names: Sequence[str]) -> str:
    """Return the value of `VARIABLE` that consents to `names` besides those it holds already.

    Raises `ProfileError` for a dangerous variable, or a text that is no variable's name.
    """
    given = [*_names(os.environ.get(VARIABLE, "")), *_names(",".join(names))]
    _refuse_dangerous(given, OPTION)
    return ",".join(dict.fromkeys(given))


def refuse_without_consent(composition: Composition) -> None:
    """Raise `ProfileError` for variables that files set without the user's consent."""
    values = composition.values.get(EXTRA) or {}
    wrong = {
        name: str(value)
        for name, value in values.items()
        if value is not None
        and f"{EXTRA}.{name}" not in composition.typed
        and (name not in allowed() or allowed()[name].legal.complaint(str(value)))
    }
    if not wrong:
        return
    consented = _names(os.environ.get(VARIABLE, ""))
    _refuse_dangerous(consented, VARIABLE)
    known = {knob.variable: f"env.{knob.variable}" for knob in CATALOGUE if knob.variable}
    known |= {name: f"{EXTRA}.{name}" for name in allowed()}
    problems = []
    for name, value in wrong.items():
        if name in consented:
            continue
        key = f"{EXTRA}.{name}"
        what = "not on the list of variables that a profile may set by itself"
        legal, close = "", known.get(near(name, known), "")
        if name in allowed():
            row = allowed()[name]
            what = "not a value that a profile may give this variable by itself"
            legal, close = row.legal.words, near(value, row.legal.choices())
        todo = (
            f"if you want it, consent: {OPTION} {name}, or {VARIABLE}={name} in the environment "
            f"(under Hydra, pytest and in code); or give the override {key}=... yourself"
        )
        place = composition.place(key)
        problems.append(Problem(what, place, key, shown(value), legal, close, todo))
    if problems:
        raise ProfileError(problems)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _refuse_dangerous(names: Sequence[str], where: str) -> None:
    problems = [Problem(why, where, found=name) for name in names if (why := refusal(name))]
    if problems:
        raise ProfileError(problems)
