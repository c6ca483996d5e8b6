"""Maps names of dimensions to mesh axes.

A program names its dimensions, such as the batch. A layout is one table for the whole program, which lists the mesh
axes for each name. A name is a mark whose sharding comes from the layout:

    >>> layout = Layout(batch="data", hidden="model", embed=None)
    >>> layout.mark(Names(("batch", "length", "embed"))).spec == (("data",), PartitionSpec.UNCONSTRAINED, None)
    True

``embed`` is whole. The layout does not mention ``length``, so ``length`` is open and propagation decides. Rows have no
order, and there are no alternatives: if two dimensions of one value need the same axis, gshard raises an error.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from gshard.core.errors import ShardingError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.mark import Mark, atoms_of_partitions
from gshard.core.mesh import Mesh

Entry = tuple[str, ...] | int | None

# Ordered rules are those of Flax, T5X and MaxText.
_ORDERED = "Of ordered rules (name, axes) flax.linen.logical_to_mesh_axes(names, rules) makes specs for gshard.shard."
_HINT = "Give a mesh axis, a tuple of axes, a number of parts, or None (whole)."


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The names of the dimensions of one value."""

    dims: tuple[str | None, ...]  # the name of each dimension, or None for a dimension without a name
    # dimensions that vmap added, in the order they were added; ``dims`` does not count them
    batch_dims: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(name or "_" for name in self.dims)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of a layout."""

    name: str  # the name of dimensions
    entry: Entry  # mesh axes, a number of parts, or None for whole dimensions

    def __str__(self) -> str:
        entry = self.entry[0] if isinstance(self.entry, tuple) and len(self.entry) == 1 else self.entry
        return f"{self.name}={entry!r}"


@dataclasses.dataclass(frozen=True, init=False)
class Layout:
    """A table of the mesh axes over which dimensions of each name are split.

    Rows have no order. A dimension whose name has no row stays open.

    Args:
        rows: a dictionary of rows, for names that are not Python identifiers.
        named: rows as keywords. Each entry is a mesh axis, a tuple of axes, a number of parts, or None (whole).

    Raises:
        ShardingError: an entry is none of these, or a name has two rows.

    >>> Layout(batch="data", hidden=("model", "expert"), embed=None)
    Layout(batch='data', hidden=('model', 'expert'), embed=None)
    """

    rows: tuple[Row, ...] = dataclasses.field(compare=False)
    _key: frozenset[Row] = dataclasses.field(repr=False)

    def __init__(self, rows: Mapping[str, Any] | None = None, /, **named: Any):
        if rows is not None and not isinstance(rows, Mapping):
            raise ShardingError(
                f"a layout is made of a dictionary or keywords, not of a {type(rows).__name__}.",
                user_line(),
                hint=f"Write Layout(batch='data'). {_ORDERED}",
            )
        made = [_row(key, entry) for key, entry in (*(rows or {}).items(), *named.items())]
        keys = [row.name for row in made]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ShardingError(f"the layout has two rows for {twice!r}.", user_line(), hint="Leave one.")
        object.__setattr__(self, "rows", tuple(made))
        object.__setattr__(self, "_key", frozenset(made))

    @staticmethod
    def checked(layout: Any) -> Layout | None:
        """Returns a layout or None unchanged.

        Raises:
            ShardingError: the value is neither a layout nor None.
        """
        if layout is None or isinstance(layout, Layout):
            return layout
        raise ShardingError(
            f"layout= takes a gshard.Layout, not a {type(layout).__name__}.",
            user_line(),
            hint=f"Write gshard.Layout(batch='data'). {_ORDERED}",
        )

    def rows_of(self, names: Names) -> tuple[Row | None, ...]:
        """The row of each dimension of a value, or None."""
        return tuple(next((row for row in self.rows if row.name == name), None) for name in names.dims)

    def mark(self, names: Names) -> Mark | None:
        """The mark that the names of one value stand for; None if no row applies."""
        rows = self.rows_of(names)
        applied = dict.fromkeys(str(row) for row in rows if row is not None)
        if not applied:
            return None
        return Mark(
            spec=tuple(PartitionSpec.UNCONSTRAINED if row is None else row.entry for row in rows),
            batch_dims=names.batch_dims,
            source_text=f"name(x, {str(names)!r}) by {', '.join(applied)}",
        )

    def check(self, mesh: Mesh) -> None:
        """Checks that all rows fit a mesh.

        Raises:
            ShardingError: the mesh does not have an axis of a row, or cannot be split into the number of parts of a
                row.
        """
        for row in self.rows:
            for axis in row.entry if isinstance(row.entry, tuple) else ():
                if axis not in mesh.atoms_of:
                    raise ShardingError(
                        f"the mesh has no axis {axis!r}, which the layout's row {row} names.",
                        got=f"mesh: {mesh}; {self}",
                        hint=known_names(axis, mesh.atoms_of),
                    )
            if isinstance(row.entry, int):
                try:
                    atoms_of_partitions(row.entry, mesh)
                except ShardingError as reason:
                    raise ShardingError(reason.what, None, f"mesh: {mesh}; layout: {row}", reason.hint) from None

    def __str__(self) -> str:
        return f"Layout({', '.join(map(str, self.rows))})"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A value of a program with names of its dimensions."""

    value: Any  # the value (``core.program.Value``)
    names: Names  # the names of its dimensions
    # the layout that applies to the names: of the program, or of a partitioned function inside it
    layout: Layout | None


def _row(name: Any, entry: Any) -> Row:
    if not isinstance(name, str) or name.split() != [name] or name in ("_", "...") or ":" in name:
        raise ShardingError(
            f"{name!r} is no name of dimensions.", user_line(), hint="A name is a word without ':', such as 'embed'."
        )
    return Row(name, _entry(entry, name))


def _entry(entry: Any, name: str) -> Entry:
    if entry is None:
        return None
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list):
        if not all(isinstance(axis, str) for axis in entry):
            raise ShardingError(f"{entry!r} is no tuple of mesh axes.", user_line(), f"row {name!r}", _HINT)
        if len(set(entry)) < len(entry):
            raise ShardingError(
                f"an axis stands twice in the row {name}={tuple(entry)!r}.", user_line(), hint="Name each axis once."
            )
        return tuple(entry) or None
    try:
        number = 0 if isinstance(entry, bool) else operator.index(entry)
    except TypeError:
        number = 0
    if number < 1:
        raise ShardingError(f"{entry!r} is nothing that {name!r} can be split over.", user_line(), None, _HINT)
    return number
