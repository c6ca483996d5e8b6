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
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from gshard.core.errors import ShardingError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.mark import Mark, atoms_of_partitions
from gshard.core.mesh import Mesh
from gshard.core.paths import is_below

Entry = tuple[str, ...] | int | None

_HINT = "Give a mesh axis, a tuple of axes, a number of parts, or None (whole)."


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The names of the dimensions of one value."""

    dims: tuple[str | None, ...]  # the name of each dimension, or None for a dimension without a name
    at: str = ""  # the path of the argument, such as ``params/w1``; empty for a value inside the program
    # dimensions that vmap added, in the order they were added; ``dims`` does not count them
    batch_dims: tuple[int, ...] = ()

    @property
    def placed(self) -> tuple[str | None, ...]:
        """The name of each dimension, including dimensions that vmap added, which have no name."""
        dims = list(self.dims)
        for position in self.batch_dims:
            dims.insert(position, None)
        return tuple(dims)

    def __str__(self) -> str:
        return " ".join(name or "_" for name in self.dims)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of a layout."""

    name: str  # the name of dimensions
    entry: Entry  # mesh axes, a number of parts, or None for whole dimensions
    at: str = ""  # a pattern of paths. The row applies to arguments at and below these paths; empty for all values.

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes in the entry."""
        return self.entry if isinstance(self.entry, tuple) else ()

    @property
    def key(self) -> str:
        """The left side of the row: ``embed``, or ``params:embed``."""
        return f"{self.at}:{self.name}" if self.at else self.name

    def __str__(self) -> str:
        entry = self.entry[0] if isinstance(self.entry, tuple) and len(self.entry) == 1 else self.entry
        return f"{self.key}={entry!r}"


@dataclasses.dataclass(frozen=True, init=False)
class Layout:
    """A table of the mesh axes over which dimensions of each name are split.

    Rows have no order. A dimension whose name has no row stays open.

    Args:
        rows: a dictionary of rows, for names that are not Python identifiers. ``"params:embed"`` is a row for
            dimensions called ``embed`` of arguments at the path ``params`` and below (``*`` and ``**`` as in ``names=``
            of ``jit``). It takes precedence over ``embed``.
        named: rows as keywords. Each entry is a mesh axis, a tuple of axes, a number of parts, or None (whole).

    Raises:
        ShardingError: an entry is none of these, or a name has two rows.

    >>> Layout({"params:embed": "data"}, batch="data", hidden=("model", "expert"), embed=None)
    Layout(params:embed='data', batch='data', hidden=('model', 'expert'), embed=None)
    """

    rows: tuple[Row, ...] = dataclasses.field(compare=False)
    ordered: bool = False
    _key: Hashable = dataclasses.field(default=None, repr=False)

    def __init__(self, rows: Mapping[str, Any] | None = None, /, **named: Any):
        if rows is not None and not isinstance(rows, Mapping):
            raise ShardingError(
                f"a layout is made of a dictionary or keywords, not of a {type(rows).__name__}.",
                user_line(),
                hint="Write Layout(batch='data'), or Layout.of(rules) for ordered rules of (name, axes).",
            )
        self._fill([_row(key, entry) for key, entry in (*(rows or {}).items(), *named.items())], False)

    def _fill(self, rows: Sequence[Row], ordered: bool) -> None:
        keys = [row.key for row in rows]
        if not ordered and (twice := next((row for row in rows if keys.count(row.key) > 1), None)):
            raise ShardingError(f"the layout has two rows for {twice.key!r}.", user_line(), hint="Leave one.")
        object.__setattr__(self, "rows", tuple(rows))
        object.__setattr__(self, "ordered", ordered)
        object.__setattr__(self, "_key", tuple(rows) if ordered else frozenset(rows))

    @staticmethod
    def of(rules: Iterable[Any]) -> Layout:
        """Creates a layout from the ordered rules of Flax, T5X and MaxText.

        gshard applies the rules to each array like ``flax.linen.logical_to_mesh_axes``, one rule after the other. A
        dimension without an entry gets the axes of the rule if no other dimension of the array has one of these axes.
        Dimensions that get no entry, and dimensions without a name, are whole. ``decided`` and ``gshard.explain`` list
        the arrays for which the order matters.

        Args:
            rules: pairs of a name and an axis, a tuple of axes, or None. A name may occur several times.

        Raises:
            ShardingError: a rule is not such a pair.

        >>> rules = (("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z"))
        >>> layout = Layout.of(rules)
        >>> layout.mark(Names(("batch", "length", "heads", "features"))).spec
        (('X',), None, ('Y',), None)
        >>> layout.decided(Names(("batch", "length", "heads", "features")))
        ("'features' is not over 'X', which 'batch' has",)
        """
        rows = []
        for rule in rules:
            if not isinstance(rule, tuple | list) or len(rule) != 2:
                hint = "A rule is a pair: (name, axis, tuple of axes or None)."
                raise ShardingError(f"{rule!r} is no rule.", user_line(), hint=hint)
            rows.append(_row(*rule, pattern=False))
        layout = Layout()
        layout._fill(rows, True)
        return layout

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
            hint="Write gshard.Layout(batch='data'), or gshard.Layout.of(rules) for ordered rules of (name, axes).",
        )

    def rows_of(self, names: Names, line: str = "") -> tuple[Row | None, ...]:
        """The row that applies to each dimension, or None.

        Args:
            names: the names of a value.
            line: the user's source line, for error messages.

        Raises:
            ShardingError: two rows with different paths apply and differ, or two dimensions have one name and the rules
                are ordered.
        """
        if self.ordered:
            return self._by_order(names, line)[0]
        return tuple(None if name is None else self._row(name, names.at, line) for name in names.dims)

    def decided(self, names: Names) -> tuple[str, ...]:
        """Texts about the axes that a value did not get because of the order of the rules; none without order."""
        return self._by_order(names)[1] if self.ordered else ()

    def mark(self, names: Names, line: str = "") -> Mark | None:
        """The mark that the names of one value stand for; None if no row applies.

        Raises:
            ShardingError: see ``rows_of``.
        """
        rows = self.rows_of(names, line)
        applied = dict.fromkeys(str(row) for row in rows if row is not None)
        if not applied and not (self.ordered and any(names.dims)):
            return None
        default = None if self.ordered else PartitionSpec.UNCONSTRAINED
        call = f"named {str(names)!r}" if names.at else f"name(x, {str(names)!r})"
        return Mark(
            "spec",
            spec=tuple(default if row is None else row.entry for row in rows),
            batch_dims=names.batch_dims,
            names=names.dims,
            source_text=f"{call} by {', '.join(applied) or 'rules without it'}",
        )

    def check(self, mesh: Mesh) -> None:
        """Checks that all rows fit a mesh.

        Raises:
            ShardingError: the mesh does not have an axis of a row, or cannot be split into the number of parts of a
                row.
        """
        for row in self.rows:
            for axis in row.axes:
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

    def _row(self, name: str, at: str, line: str) -> Row | None:
        rows_of_name = [row for row in self.rows if row.name == name]
        rows_of_path = [row for row in rows_of_name if row.at and at and is_below(row.at, at)]
        if len({row.entry for row in rows_of_path}) > 1:
            raise ShardingError(
                f"two rows of the layout disagree about {name!r} of {at}.",
                line,
                ", ".join(map(str, rows_of_path)),
                hint="Rows have no order: make their paths such that one applies.",
            )
        return next(iter(rows_of_path), None) or next((row for row in rows_of_name if not row.at), None)

    def _by_order(self, names: Names, line: str = "") -> tuple[tuple[Row | None, ...], tuple[str, ...]]:
        """The row of each dimension by ordered rules, and texts about the axes that are lost to earlier rules."""
        all_names = [name for name in names.dims if name is not None]
        if twice := next((name for name in all_names if all_names.count(name) > 1), None):
            raise ShardingError(
                f"two dimensions of one value are called {twice!r}, which ordered rules do not allow.",
                line,
                f"names {str(names)!r}",
                hint="Give one another name, or '_', or use a Layout without order.",
            )
        row_of: dict[int, Row] = {}
        decided: dict[str, None] = {}
        for row in self.rows:
            if row.name not in names.dims:
                continue
            dim = names.dims.index(row.name)
            if dim in row_of:
                continue
            owner = next((d for d, other in row_of.items() for axis in other.axes if axis in row.axes), None)
            if owner is None:
                row_of[dim] = row
            else:
                axes = " ".join(map(repr, row.axes))
                decided[f"{row.name!r} is not over {axes}, which {names.dims[owner]!r} has"] = None
        return tuple(row_of.get(d) for d in range(len(names.dims))), tuple(decided)

    def __str__(self) -> str:
        if self.ordered:
            return f"Layout.of(({', '.join(f'{(row.name, row.entry)}' for row in self.rows)}))"
        return f"Layout({', '.join(map(str, self.rows))})"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A value of a program with names of its dimensions."""

    value: Any  # the value (``core.program.Value``)
    names: Names  # the names of its dimensions
    line: str  # the user's source line; empty for arguments
    # the layout that applies to the names: of the program, or of a partitioned function inside it
    layout: Layout | None

    @property
    def place(self) -> str:
        """The place where the user gave the names, for messages."""
        return f"argument {self.names.at}" if self.names.at and not self.line else self.line


def _row(key: Any, entry: Any, *, pattern: bool = True) -> Row:
    at, _, name = key.rpartition(":") if isinstance(key, str) and pattern else ("", "", key)
    if not isinstance(name, str) or not name or name.split() != [name] or name in ("_", "..."):
        raise ShardingError(
            f"{key!r} is no name of dimensions.",
            user_line(),
            hint="A name is a word; 'params:embed' is the row of 'embed' for arguments below params.",
        )
    return Row(name, _entry(entry, name), at)


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
