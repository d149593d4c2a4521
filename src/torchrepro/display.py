"""How answers show themselves: as text where they are printed, as HTML in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

    from rich.table import Table

    Part: TypeAlias = Table | str


class Displayed:
    """An answer that consists of tables and lines.

    A notebook asks for `_repr_html_`:
    https://ipython.readthedocs.io/en/stable/config/integrating.html
    """

    __slots__ = ()

    def parts(self) -> tuple[Part, ...]:
        """Return the tables and lines."""
        raise NotImplementedError

    def __str__(self) -> str:
        from torchrepro.tables import as_text

        return as_text(*self.parts())

    def _repr_html_(self) -> str:
        from torchrepro.tables import as_html

        return as_html(*self.parts())
