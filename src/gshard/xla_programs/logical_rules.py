"""Logical rules: writes a plan as ordered rules of logical axis names, as Flax Linen, T5X and MaxText read them.

    [("mlp", "model"), ("embed", "data"), ("layers", None)]

Rules apply to each array in their order: a dimension without an entry gets the rule's axes if no other dimension of the
array has one of them (``flax.linen.logical_to_mesh_axes``). So the order decides where two names of one array want the
same axis. A rule can be written next if it gives no array anything but the plan's sharding; writing one never makes
another worse, so the order is found greedily whenever there is one. If there is none, the rules contradict.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.layout import Layout, Names
from gshard.core.partition_spec import spec_of_axes
from gshard.naming.dimension_metadata import DimensionNames
from gshard.xla_programs.exported_arguments import ExportedArgument
from gshard.xla_programs.exported_rows import ExportedRows, RowExport

Axes = tuple[str, ...]
LogicalRule = tuple[str, Axes]
_SHOWN = 8  # arrays of a conflict in a message


def logical_rules(
    export: RowExport, names: Mapping[ExportedArgument, DimensionNames], *, nearest: bool = False
) -> ExportedRows:
    """The rules that give arrays the plan's shardings, checked.

    Args:
        export: the plan.
        names: of the dimensions of each array, those that have some.
        nearest: whether rules that contradict are settled by bytes.

    Raises:
        ShardingError: no array has names, one has a name twice, or, without ``nearest``, the rules contradict.
    """
    if not any(map(any, names.values())):
        raise ShardingError(
            "no array has logical names, so there are no rules for them.",
            user_line(),
            hint="Give them: exported.logical_axis_rules(({'w': ('embed', 'mlp')}, None)), a pytree of tuples of "
            "names like the arguments, or what flax.linen.get_partition_spec returns.",
        )
    arrays = [_Array(a, said) for a, said in names.items() if any(said)]
    for array in arrays:
        array.check()
    ordered, conflict = _ordered(arrays, nearest=nearest)
    unnamed = [(a, d) for a in arrays for d in a.unnamed_dims]
    if (conflict or unnamed) and not nearest:
        raise _contradiction(conflict, arrays, unnamed)
    split = {name for name, _ in ordered}
    whole = dict.fromkeys(n for a in arrays for n in a.names if n is not None and n not in split)
    rules = [*((n, axes[0] if len(axes) == 1 else axes) for n, axes in ordered), *((n, None) for n in whole)]
    layout = Layout.of(rules)
    given = {
        a.argument: spec_of_axes(() if row is None else row.axes for row in layout.rows_of(Names(a.names)))
        for a in arrays
    }
    code = "\n".join(["logical_axis_rules = [", *(f"    {rule!r}," for rule in rules), "]"])
    return export.checked(rules, code, given)


@dataclasses.dataclass(eq=False)
class _Array:
    """An array with names, and what the rules so far give it."""

    argument: ExportedArgument
    names: DimensionNames
    given: dict[int, Axes] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Refuses what Flax refuses."""
        if twice := next((n for n, times in Counter(self.names).items() if n is not None and times > 1), None):
            raise ShardingError(
                f"two dimensions of {self.argument.path} are called {twice!r}, which rules do not allow.",
                user_line(),
                f"{self.argument}, named {self.names}",
                "Give one another name, or None.",
            )

    @property
    def unnamed_dims(self) -> Iterator[int]:
        """The dimensions that the plan splits and that have no name."""
        return (d for d, axes in enumerate(self.argument.axes) if axes and self.names[d] is None)

    def wants(self, rule: LogicalRule) -> bool:
        """Whether a dimension waits for this rule."""
        d = self._at(rule)
        return d is not None and self.argument.axes[d] == rule[1]

    def is_wronged(self, rule: LogicalRule) -> bool:
        """Whether the rule, written next, gives a dimension something else than the plan."""
        d = self._at(rule)
        return d is not None and self._is_free(rule) and self.argument.axes[d] != rule[1]

    def take(self, rule: LogicalRule) -> None:
        """Applies the rule."""
        d = self._at(rule)
        if d is not None and self._is_free(rule):
            self.given[d] = rule[1]

    def _at(self, rule: LogicalRule) -> int | None:
        """The dimension of that name, unless it has an entry."""
        d = self.names.index(rule[0]) if rule[0] in self.names else None
        return None if d in self.given else d

    def _is_free(self, rule: LogicalRule) -> bool:
        return not any(set(axes) & set(rule[1]) for axes in self.given.values())


def _ordered(arrays: Sequence[_Array], *, nearest: bool) -> tuple[list[LogicalRule], list[LogicalRule]]:
    """The rules in an order in which they give the plan's shardings, and those for which there is none.

    With ``nearest`` the rule that costs least is written or left out, and so on until none is left.
    """
    wanted: Counter[LogicalRule] = Counter()
    for array in arrays:
        for name, axes in zip(array.names, array.argument.axes, strict=True):
            if name is not None and axes:
                wanted[name, axes] += array.argument.value.bytes
    left = [rule for rule, _ in wanted.most_common()]
    rules: list[LogicalRule] = []
    while left:
        wrong = {rule: _bytes(a for a in arrays if a.is_wronged(rule)) for rule in left}
        rule = next((rule for rule in left if not any(a.is_wronged(rule) for a in arrays)), None)
        if rule is None:
            if not nearest:
                return rules, left
            missed = {rule: _bytes(a for a in arrays if a.wants(rule)) for rule in left}
            least = min(left, key=lambda rule: min(wrong[rule], missed[rule]))
            left.remove(least)
            if missed[least] < wrong[least]:
                continue
            rule = least
        else:
            left.remove(rule)
        for array in arrays:
            array.take(rule)
        rules.append(rule)
    return rules, []


def _bytes(arrays: Iterator[_Array]) -> int:
    return sum(a.argument.value.bytes for a in arrays)


def _contradiction(
    conflict: Sequence[LogicalRule], arrays: Sequence[_Array], unnamed: Sequence[tuple[_Array, int]]
) -> ShardingError:
    """The arrays that want different things of a name."""
    lines = [f"{a.argument}: dimension {d} is split and has no name" for a, d in unnamed]
    for name in dict.fromkeys(name for name, _ in conflict):
        for array in arrays:
            if name in array.names:
                axes = array.argument.axes[array.names.index(name)]
                over = " and ".join(map(repr, axes)) if axes else "nothing"
                lines.append(f"{name!r} over {over}: {array.argument}, named {array.names}")
    more = [f"and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
    return ShardingError(
        "no rules of logical names give these arrays the plan's shardings.",
        user_line(),
        "\n    ".join(["", *lines[:_SHOWN], *more]),
        "Give these dimensions names of their own, or write nearest=True, which keeps most bytes as planned and lists "
        "the rest.",
    )
