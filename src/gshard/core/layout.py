"""Layout: maps names of dimensions to mesh axes.

A program says which dimensions are the batch; a layout, one table for all of it, says over which axis the batch is
split. A name is nothing but a mark whose meaning comes from the layout:

    >>> layout = Layout(batch="data", hidden="model", embed=None)
    >>> layout.mark(Names(("batch", "length", "embed"))).spec == (("data",), PartitionSpec.UNCONSTRAINED, None)
    True

``embed`` is whole; ``length``, which the layout does not mention, is open: propagation decides. Rows have no order, and
there are no second choices: two dimensions of one value that want the same axis are an error.
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
    """The names of the dimensions of one value.

    Attributes:
        dims: for each dimension its name, or None where nothing is said.
        at: the path of the argument that the value is, such as ``params/w1``; empty for values inside.
        batch_dims: dimensions that vmap added, in the order they were added; ``dims`` does not count them.
    """

    dims: tuple[str | None, ...]
    at: str = ""
    batch_dims: tuple[int, ...] = ()

    def with_batch_dimension(self, dim: int) -> Names:
        """The same names on an array that has one more dimension, at ``dim``."""
        return dataclasses.replace(self, batch_dims=(*self.batch_dims, dim))

    @property
    def placed(self) -> tuple[str | None, ...]:
        """For each dimension its name, those that vmap added included: they have none."""
        dims = list(self.dims)
        for position in self.batch_dims:
            dims.insert(position, None)
        return tuple(dims)

    def __str__(self) -> str:
        return " ".join(name or "_" for name in self.dims)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of a layout.

    Attributes:
        name: of dimensions.
        entry: axes, a number of parts, or None: whole.
        at: a pattern of paths; the row is for arguments there and below only. Empty for all values.
    """

    name: str
    entry: Entry
    at: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it names."""
        return self.entry if isinstance(self.entry, tuple) else ()

    @property
    def key(self) -> str:
        """What stands on its left: ``embed``, or ``params:embed``."""
        return f"{self.at}:{self.name}" if self.at else self.name

    def __str__(self) -> str:
        entry = self.entry[0] if isinstance(self.entry, tuple) and len(self.entry) == 1 else self.entry
        return f"{self.key}={entry!r}"


@dataclasses.dataclass(frozen=True, init=False)
class Layout:
    """What names of dimensions mean: over which mesh axes each is split.

    Rows have no order. A name that no row mentions stays open.

    Args:
        rows: a dictionary of rows, for names that are no words of Python's. ``"params:embed"`` is a row for dimensions
            called ``embed`` of arguments at the path ``params`` and below it (``*`` and ``**`` as in ``names=`` of
            ``jit``); it goes before ``embed``.
        named: rows as keywords. Each is a mesh axis, a tuple of axes, a number of parts, or None: whole.

    Raises:
        ShardingError: a row is none of these, or is given twice.

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
        """Reads the ordered rules of Flax, T5X and MaxText: pairs of a name and an axis, several axes, or None.

        They are applied to each array as there (``flax.linen.logical_to_mesh_axes``): rule after rule, a dimension
        that has no entry yet gets the rule's axes if no other dimension of the array has one of them; what is left in
        the end is whole, and so are dimensions without a name. ``decided`` and ``gshard.explain`` tell where the
        order decided.

        Args:
            rules: the pairs, the first that is free wins. A name may occur again.

        Raises:
            ShardingError: a rule is no such pair.

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
        made = Layout()
        made._fill(rows, True)
        return made

    @staticmethod
    def checked(layout: Any) -> Layout | None:
        """A layout, or None if there is none.

        Raises:
            ShardingError: it is something else.
        """
        if layout is None or isinstance(layout, Layout):
            return layout
        raise ShardingError(
            f"layout= takes a gshard.Layout, not a {type(layout).__name__}.",
            user_line(),
            hint="Write gshard.Layout(batch='data'), or gshard.Layout.of(rules) for ordered rules of (name, axes).",
        )

    def rows_of(self, names: Names, line: str = "") -> tuple[Row | None, ...]:
        """For each dimension the row that applies to it, if there is one.

        Raises:
            ShardingError: two rows for different paths apply and disagree, or ordered rules meet a name twice; at this
                line of the user's.
        """
        if self.ordered:
            return self._by_order(names, line)[0]
        return tuple(None if name is None else self._row(name, names.at, line) for name in names.dims)

    def decided(self, names: Names) -> tuple[str, ...]:
        """Where the order of rules decided about a value, as text; nothing for a layout without order."""
        return self._by_order(names)[1] if self.ordered else ()

    def mark(self, names: Names, line: str = "") -> Mark | None:
        """What the names of one value mean; None where no row applies.

        Raises:
            ShardingError: see ``rows_of``.
        """
        rows = self.rows_of(names, line)
        applied = dict.fromkeys(str(row) for row in rows if row is not None)
        if not applied and not (self.ordered and any(names.dims)):
            return None
        rest = None if self.ordered else PartitionSpec.UNCONSTRAINED
        said = f"named {str(names)!r}" if names.at else f"name(x, {str(names)!r})"
        return Mark(
            "spec",
            spec=tuple(rest if row is None else row.entry for row in rows),
            batch_dims=names.batch_dims,
            names=names.dims,
            said=f"{said} by {', '.join(applied) or 'rules without it'}",
        )

    def check(self, mesh: Mesh) -> None:
        """Refuses rows that this mesh has no axes, or not the number of devices, for.

        Raises:
            ShardingError: the mesh has no such axis, or cannot be cut in so many parts.
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
        found = [row for row in self.rows if row.name == name]
        own = [row for row in found if row.at and at and is_below(row.at, at)]
        if len({row.entry for row in own}) > 1:
            raise ShardingError(
                f"two rows of the layout disagree about {name!r} of {at}.",
                line,
                ", ".join(map(str, own)),
                hint="Rows have no order: make their paths such that one applies.",
            )
        return next(iter(own), None) or next((row for row in found if not row.at), None)

    def _by_order(self, names: Names, line: str = "") -> tuple[tuple[Row | None, ...], tuple[str, ...]]:
        said = [name for name in names.dims if name is not None]
        if twice := next((name for name in said if said.count(name) > 1), None):
            raise ShardingError(
                f"two dimensions of one value are called {twice!r}, which ordered rules do not allow.",
                line,
                f"names {str(names)!r}",
                hint="Give one another name, or '_', or use a Layout without order.",
            )
        given: dict[int, Row] = {}
        decided: dict[str, None] = {}
        for row in self.rows:
            if row.name not in names.dims or (at := names.dims.index(row.name)) in given:
                continue
            taken = next(((a, names.dims[d]) for d, g in given.items() for a in g.axes if a in row.axes), None)
            if taken is None:
                given[at] = row
            else:
                decided[f"{row.name!r} is not over {' '.join(map(repr, row.axes))}, which {taken[1]!r} has"] = None
        return tuple(given.get(d) for d in range(len(names.dims))), tuple(decided)

    def __str__(self) -> str:
        if self.ordered:
            return f"Layout.of(({', '.join(f'{(row.name, row.entry)}' for row in self.rows)}))"
        return f"Layout({', '.join(map(str, self.rows))})"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A value of a program that has names.

    Attributes:
        value: the value (``core.program.Value``).
        names: its names.
        line: the user's source line; empty for arguments.
        layout: what they mean here: that of the program, or of a partitioned function inside of it.
    """

    value: Any
    names: Names
    line: str
    layout: Layout | None

    @property
    def place(self) -> str:
        """Where the names were given, for messages."""
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
