"""Smaller sizes for the dimensions of two programs, so that large programs run exactly in seconds.

Each dimension is a product of loops (``LoopTable``), which the equations of both programs join. A loop gets a smaller
size if it is part of an argument or a result, and no equation depends on its size. These stay whole: mesh axes, loops
along which an equation takes some of the elements, loops whose positions or counts meet other numbers than 0 and 1 (a
window, indices of a vocabulary), and all loops of equations that are not understood.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from gshard.core.jax_adapter import called_jaxpr, closed, scan_counts, sub_jaxprs, user_line
from gshard.core.rule import COMMUNICATE, REDUCE, REPLICATE, Rule
from gshard.exact.positions import PASSES, Dims, Number, Numbers, is_integer, is_real, literal
from gshard.language.kernel_loops import Loops, call_of
from gshard.language.registry import rule_of
from gshard.language.traits import traits_of

SMALL = (2, 3)  # smaller sizes, in turn, so that programs that exchange two dimensions differ
INDEXED = 5  # smaller size of a loop of a dimension that integer arguments index
MOST = 30_000  # programs with at most as many elements of all values stay as they are

# Equations that run on smaller arrays with the same parameters, but for shapes, which follow from operands and results.
_SAME = frozenset(
    """argmax argmin broadcast_in_dim concatenate concatenate_slices cumlogsumexp cummax cummin cumprod cumsum
    device_put empty fft gather gshard_mark iota pad reduce reduce_max reduce_min reshape reshard rev scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub sharding_constraint slice sort split top_k""".split()
)
_EXCHANGES = frozenset("all_gather all_to_all ppermute".split())  # collectives that only move elements
_MOVES = frozenset("concatenate concatenate_slices pad slice split".split())  # equations that move blocks of elements
# Equations that work in the same way along dimensions of all sizes.
_ALONG = frozenset("argmax argmin cumlogsumexp cummax cummin cumprod cumsum rev sort".split())


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The smaller sizes. Without a table all sizes stay."""

    notes: list[str] = dataclasses.field(default_factory=list)  # what became smaller, as text
    _leaves: Callable[[int], list[tuple[int, int]]] = lambda loop: []  # the parts of a loop, before and after
    _dims: Mapping[Any, Dims] = dataclasses.field(default_factory=dict)
    _lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    _literals: Mapping[tuple[int, int], tuple[tuple[int, ...], int]] = dataclasses.field(default_factory=dict)
    _limits: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    _blocks: Mapping[int, Mapping[int, int]] = dataclasses.field(default_factory=dict)

    def shape(self, v: Any) -> tuple[int, ...]:
        """The smaller shape of a variable or a literal of one of the programs."""
        if isinstance(v, Literal) or v not in self._dims:
            return tuple(v.aval.shape)
        return tuple(math.prod(map(self._size, dim)) for dim in self._dims[v])

    def length(self, eqn: Any) -> int:
        """The smaller number of iterations of a scan."""
        return self._size(self._lengths[id(eqn)]) if id(eqn) in self._lengths else int(eqn.params["length"])

    def params(self, eqn: Any) -> dict[str, Any]:
        """The parameters of an equation, with the bounds of slices and paddings for the smaller sizes."""
        p, blocks = eqn.params, self._blocks.get(id(eqn))
        if blocks is None:
            return p

        def scaled(n: int, d: int) -> int:
            pairs = self._leaves(blocks[d]) if d in blocks else []
            return n // math.prod(before for before, _ in pairs) * math.prod(after for _, after in pairs)

        if "padding_config" in p:
            config = enumerate(p["padding_config"])
            return {**p, "padding_config": tuple((scaled(a, d), scaled(b, d), inner) for d, (a, b, inner) in config)}
        if "start_indices" in p:
            bounds = {key: tuple(map(scaled, p[key], range(len(p[key])))) for key in ("start_indices", "limit_indices")}
            return {**p, **bounds}
        d = p["axis"] if "axis" in p else p["dimension"]
        return {**p, **{key: jax.tree.map(lambda n: scaled(n, d), p[key]) for key in ("sizes", "slices") if key in p}}

    def number(self, eqn: Any, i: int) -> int | None:
        """The number in place of a literal, operand ``i``, that is a size; None if the literal stays."""
        loops, delta = self._literals.get((id(eqn), i), ((), 0))
        return math.prod(map(self._size, loops)) + delta if loops else None

    def limit(self, v: Any) -> int | None:
        """The limit of the integers of an argument that are indices of a smaller dimension; None for others."""
        loop = self._limits.get(v)
        return None if loop is None or all(m == n for n, m in self._leaves(loop)) else self._size(loop)

    def cut(self, array: Any, v: Any) -> Any:
        """The array of a variable with the smaller shape: the first elements of each loop; indices modulo the limit."""
        for d, dim in enumerate(self._dims.get(v, ())):
            at = np.zeros(1, int)
            for before, after in (pair for loop in dim for pair in self._leaves(loop)):
                at = (at[:, None] * before + np.arange(after)).reshape(-1)
            array = array if len(at) == array.shape[d] else array.take(at, axis=d)
        limit = self.limit(v)
        return array if limit is None else (array % limit).astype(array.dtype)

    def _size(self, loop: int) -> int:
        return math.prod(after for _, after in self._leaves(loop))


def shrunk(plain: Any, sharded: Any, given: Sequence[Any] = (), *, most: int = MOST) -> Sizes:
    """The smaller sizes of two closed jaxprs with the same arguments and results, without dead code.

    Args:
        plain, sharded: the programs; each may contain ``shard_map`` equations.
        given: the flat arguments. Integers that have values, some of them negative or too large for an index, are none.
        most: programs with at most as many elements of all values stay as they are.
    """
    if elements_of(plain, sharded) <= most:
        return Sizes()
    reader, (a, b) = _Reader(), (closed(jaxpr)[0] for jaxpr in (plain, sharded))
    table, dims = reader.table, [[[reader.table.new(n)] for n in v.aval.shape] for v in a.invars]
    numbers = [Number("index", (table.new(0),)) if is_integer(v) else None for v in a.invars]
    for jaxpr in (plain, sharded):
        reader.settle(reader.body(jaxpr, dims, numbers))
    for x, array in zip(numbers, given, strict=False):
        if x is None or not np.size(array) or isinstance(array, jax.ShapeDtypeStruct):
            continue
        if np.min(array) < 0 or np.max(array) >= reader.count(x.loops):
            reader.settle([x])
    for site in reader.fixed & reader.literals.keys():
        reader.settle([Number("offset", reader.literals.pop(site)[0])])
    for v, w in zip(a.outvars, b.outvars, strict=True):
        reader.join(reader.dims_of(v), reader.dims_of(w))
    outer = [dim for v in (*a.invars, *a.outvars) for dim in reader.dims_of(v)]
    whole, small = table.whole(), dict[int, int]()
    ranges = [x.loops[0] for x in numbers if x is not None and table.sizes[x.loops[0]]]
    indexed = {leaf for loop in ranges for leaf in table.leaves(loop)}
    for leaf in (leaf for dim in outer for loop in dim for leaf in table.leaves(loop)):
        size = INDEXED if leaf in indexed else SMALL[len(small) % len(SMALL)]
        if leaf not in whole and table.sizes[leaf] > size:
            small.setdefault(leaf, size)

    known: dict[int, list[tuple[int, int]]] = {}

    def leaves(loop: int) -> list[tuple[int, int]]:
        if loop not in known:
            found = table.leaves(loop) if table.sizes[loop] else [loop]
            known[loop] = [(table.sizes[leaf], small.get(leaf, table.sizes[leaf])) for leaf in found]
        return known[loop]

    limits = {v: x.loops[0] for body in (a, b) for v, x in zip(body.invars, numbers, strict=True)
              if x is not None and x.loops[0] in ranges}  # fmt: skip
    sizes = Sizes([], leaves, reader.dims, reader.lengths, reader.literals, limits, reader.blocks)
    changes = [(reader.count(dim), math.prod(map(sizes._size, dim)), reader.axes_of(dim)) for dim in outer]
    for eqn in reader.scans:
        where = f" iterations of the scan at {user_line(eqn.source_info)}"
        changes.append((int(eqn.params["length"]), sizes.length(eqn), where))
    sizes.notes.extend(dict.fromkeys(f"{n} -> {m}{text}" for n, m, text in changes if n != m))
    return sizes


def elements_of(*jaxprs: Any) -> int:
    """The number of elements of all values of programs."""
    total = 0
    for jaxpr in jaxprs:
        body = closed(jaxpr)[0]
        total += sum(math.prod(v.aval.shape) for v in (*body.invars, *body.constvars))
        for eqn in body.eqns:
            inner = elements_of(*sub_jaxprs(eqn.params))
            total += sum(math.prod(v.aval.shape) for v in eqn.outvars) + inner * int(eqn.params.get("length", 1))
    return total


class _Reader(Numbers):
    """Reads the equations of both programs, and joins their loops."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: dict[Any, Dims] = {}  # of each variable
        self.scans: list[Any] = []  # all scans
        self.lengths: dict[int, int] = {}  # the loop of each scan, by the identity of its equation
        self.blocks: dict[int, dict[int, int]] = {}  # the loops of blocks that an equation moves, by its identity
        self._axes: dict[Any, tuple[int, int]] = {}  # the size and the loop of each mesh axis

    def axes_of(self, dim: Loops) -> str:
        """The mesh axes that are part of a dimension, as text."""
        leaves = {leaf for loop in dim for leaf in self.table.leaves(loop)}
        found = [name for name, (_, loop) in self._axes.items() if not leaves.isdisjoint(self.table.leaves(loop))]
        return f" ({', '.join(found)})" if found else ""

    def dims_of(self, v: Any) -> Dims:
        """The dimensions of an operand."""
        return self.whole(np.shape(v.val)) if isinstance(v, Literal) else self.dims[v]

    def enter(self, variables: Sequence[Any], arrays: Sequence[Dims]) -> None:
        """Variables have these dimensions. Variables of a body that several equations share have those of all."""
        for v, dims in zip(variables, arrays, strict=True):
            fits = [self.count(dim) == n for dim, n in zip(dims, v.aval.shape, strict=True)]
            self.keep_whole(dim for dim, fit in zip(dims, fits) if not fit)  # factors that stand for several sizes
            dims = [dim if fit else self.whole([n])[0] for dim, fit, n in zip(dims, fits, v.aval.shape)]
            self.join(self.dims.setdefault(v, dims), dims)

    def body(self, jaxpr: Any, operands: Sequence[Dims], numbers: Sequence[Number | None]) -> list[Number | None]:
        """Reads a jaxpr; returns what is known of the numbers of its results."""
        body = closed(jaxpr)[0]
        self.enter(body.invars, operands)
        self.enter(body.constvars, [[[self.table.new(n)] for n in v.aval.shape] for v in body.constvars])
        known = dict(zip(body.invars, numbers, strict=True))
        for eqn in body.eqns:
            self.table.reading = eqn
            xs = [literal(eqn, i) if isinstance(v, Literal) else known.get(v) for i, v in enumerate(eqn.invars)]
            known.update(zip(eqn.outvars, self._equation(eqn, list(map(self.dims_of, eqn.invars)), xs), strict=False))
        return [None if isinstance(v, Literal) else known.get(v) for v in body.outvars]

    def _equation(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> Sequence[Number | None]:
        """Reads one equation."""
        name, called = eqn.primitive.name, called_jaxpr(eqn)
        if called is not None and len(closed(called)[0].invars) == len(operands):
            found = self.body(called, operands, numbers)
            self.enter(eqn.outvars, self._results(called))
            return found
        if name in _BODIES:
            _BODIES[name](self, eqn, operands, numbers)
        elif name == "axis_index":
            self.enter(eqn.outvars, [[]])
            return [Number("device")]
        elif "axis_name" in eqn.params or "axis_index_groups" in eqn.params:
            kept = ("index", "place", "derived") if name in _EXCHANGES else ("derived",)
            found = [x if x is not None and x.kind in kept else None for x in numbers]
            self.settle(x for x, y in zip(numbers, found, strict=True) if y is None)
            self._collective(eqn, operands)
            return found[: len(eqn.outvars)]
        elif name == "dynamic_slice":
            self._slice(eqn, operands, numbers)
            return self.moved(numbers[0])
        elif name == "dynamic_update_slice":
            self.settle(numbers[:2])
            self._slice(eqn, operands, numbers)
        else:
            counted = self._rule(eqn, operands, numbers)
            if traits_of(name).elementwise or name in PASSES:
                return [self.elementwise(eqn, numbers)]
            if name == "slice":
                return self.moved(numbers[0])
            at = numbers[1] if name == "scatter" and eqn.invars[1].aval.shape == (1,) else None
            if (
                at is not None
                and (at.kind, at.value) == ("literal", 0)
                and eqn.invars[0].aval.size == eqn.invars[2].aval.size
            ):
                return numbers[2:3]  # one update replaces all elements
            self.settle(x for v, x in zip(eqn.invars, numbers, strict=True) if not is_real(v))
            if name == "iota":
                return [Number("position", tuple(self.dims[eqn.outvars[0]][eqn.params["dimension"]]))]
            return [Number("derived", counted) if is_integer(v) else None for v in eqn.outvars]
        return []

    def _rule(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> tuple[int, ...]:
        """Joins loops as the rule of an equation describes; returns those along which it may count."""
        table, name, rule = self.table, eqn.primitive.name, rule_of(call_of(eqn), eqn.source_info)
        opaque = rule.local is not None and name not in _SAME and not traits_of(name).elementwise
        if opaque or rule.on_mesh is not None or not rule.is_free or eqn.effects:
            self.keep_whole(dim for dims in operands for dim in dims)
            self.enter(eqn.outvars, [self.whole(v.aval.shape) for v in eqn.outvars])
            return ()
        loops, blocks = [table.new(factor.size) for factor in rule.factors], self._blocks_of(eqn, rule)

        def dims_of(own: Any, v: Any) -> Dims:
            at = enumerate(zip(own, v.aval.shape, strict=True))
            return [self._of_blocks(n, blocks[d]) if d in blocks else [loops[f] for f in fs] for d, (fs, n) in at]

        kinds = [factor.monoid if factor.kind == REDUCE else factor.kind for factor in rule.factors]
        stays = ("pick",) if name in _ALONG else ("pick", COMMUNICATE, REPLICATE)
        looked_up = self.looked_up(eqn, operands, numbers)
        found = set() if looked_up is None else set(rule.operands[0][looked_up])
        table.keep_whole(loops[f] for f, kind in enumerate(kinds) if kind in stays and f not in found)
        if name.startswith("scatter"):  # along dimensions that updates do not cover, they are at positions
            found |= {f for own in rule.operands[2] for f in own}
            table.keep_whole(loops[f] for own in rule.operands[0] for f in own if f not in found)
        for v, dims, own in zip(eqn.invars, operands, rule.operands, strict=True):
            pairs = [(dim, loops) for dim, loops in zip(dims, dims_of(own, v), strict=True) if loops]
            self.join(*zip(*pairs)) if pairs else None
        self.enter(eqn.outvars, list(map(dims_of, rule.results, eqn.outvars)))
        return tuple(loop for loop, kind in zip(loops, kinds, strict=True) if kind in ("add", "mul", COMMUNICATE))

    def _blocks_of(self, eqn: Any, rule: Rule) -> dict[int, int]:
        """The loop of a block, for each dimension along which an equation moves blocks of elements.

        Blocks are as large as possible: all bounds, and all sizes of the dimension, are multiples.
        """
        found = dict[int, int]()
        for d in range(eqn.outvars[0].aval.ndim if rule.index and eqn.primitive.name in _MOVES else 0):
            spans = [span for index in rule.index or () for span in index[d]]
            if spans:
                sizes = [v.aval.shape[d] for v in (*eqn.invars, *eqn.outvars) if v.aval.ndim]
                bounds = [n for span in spans for n in (span.start, span.count)]
                is_dense = all(span.step == 1 for span in spans)
                found[d] = self.table.new(math.gcd(*sizes, *bounds) if is_dense else 1)
        return self.blocks.setdefault(id(eqn), found) if found else found

    def _of_blocks(self, n: int, block: int) -> Loops:
        """A dimension of ``n`` elements: the number of blocks stays whole."""
        return [*self.whole([n // max(self.table.sizes[block], 1)])[0], block]

    def _collective(self, eqn: Any, operands: list[Dims]) -> None:
        """Collectives keep shapes, but for a dimension that is gathered or cut: the parts are its major loop."""
        p, groups = eqn.params, eqn.params.get("axis_index_groups")
        gathers = p.get("all_gather_dimension", p.get("concat_axis"))
        cuts = p.get("scatter_dimension", p.get("split_axis"))
        if (gathers, cuts) == (None, None) and len(operands) != len(eqn.outvars):  # a ragged one
            self.keep_whole(dim for dims in operands for dim in dims)
            operands = [self.whole(v.aval.shape) for v in eqn.outvars]
        elif (gathers, cuts) != (None, None):
            dims = list(operands[0])
            parts = len(groups[0]) if groups else math.prod(self._axes[a][0] for a in _names(p["axis_name"]))
            (axis,) = self.whole([parts])
            if cuts is not None:
                inner = [self.table.new(self.count(dims[cuts]) // parts)]
                self.join([dims[cuts]], [[*axis, *inner]])
                dims[cuts : cuts + 1] = [inner] if p["tiled"] else []
            if gathers is not None:
                dims[gathers : gathers + p["tiled"]] = [[*axis, *dims[gathers]] if p["tiled"] else axis]
            operands = [dims]
        self.enter(eqn.outvars, operands)

    def _slice(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """A slice at positions known at run time, or its update. Each device may take the part at its offset."""
        updates, dims = eqn.primitive.name == "dynamic_update_slice", Dims()
        sizes = (eqn.invars[1] if updates else eqn.outvars[0]).aval.shape
        for m, dim, start in zip(sizes, operands[0], numbers[1 + updates :], strict=True):
            n = self.count(dim)
            if n == m:
                dims.append(dim)
            elif start and start.kind == "offset" and self.count(start.loops) == m and n % m == 0:
                dims.append(list(start.loops))
                self.join([dim], [[*self.whole([n // m])[0], *start.loops]])
            else:
                self.settle([start])
                self.keep_whole([dim])
                dims += self.whole([m])
        if updates:
            self.join(dims, operands[1])
        self.enter(eqn.outvars, [operands[0] if updates else dims])

    # Equations with bodies

    def _results(self, jaxpr: Any) -> list[Dims]:
        return list(map(self.dims_of, closed(jaxpr)[0].outvars))

    def _scan(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """The iterations are a loop. It stays whole if nothing is scanned over, or if iterations are counted."""
        body, (consts, carry) = eqn.params["jaxpr"], scan_counts(eqn.params)
        first, length = consts + carry, self.table.new(int(eqn.params["length"]))
        self.scans += [eqn] * (id(eqn) not in self.lengths)
        loop = [self.lengths.setdefault(id(eqn), length)]
        counters = [v for v in eqn.invars[consts:first] if is_integer(v) and not v.aval.shape]
        if first == len(operands) or counters:
            self.keep_whole([loop])
        self.join([dims[0] for dims in operands[first:]], [loop] * len(operands[first:]))
        self.settle(numbers[consts:first])
        numbers[consts:first] = [None] * carry
        self.settle(self.body(body, [*operands[:first], *(dims[1:] for dims in operands[first:])], numbers))
        self.enter(closed(body)[0].invars[consts:first], self._results(body)[:carry])
        self.enter(eqn.outvars, [*operands[consts:first], *([loop, *dims] for dims in self._results(body)[carry:])])

    def _while(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """The carry has the same dimensions before and after."""
        test, body, n = (eqn.params[key] for key in ("cond_jaxpr", "body_jaxpr", "cond_nconsts"))
        first = n + eqn.params["body_nconsts"]
        self.settle(numbers[first:])
        numbers[first:] = [None] * len(numbers[first:])
        self.settle(self.body(test, operands[:n] + operands[first:], numbers[:n] + numbers[first:]))
        self.settle(self.body(body, operands[n:], numbers[n:]))
        self.enter(closed(body)[0].invars[first - n :], self._results(body))
        self.enter(eqn.outvars, operands[first:])

    def _cond(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """The results have the dimensions of the results of all branches."""
        self.settle(numbers[:1])
        for branch in eqn.params["branches"]:
            self.settle(self.body(branch, operands[1:], numbers[1:]))
            self.enter(eqn.outvars, self._results(branch))

    def _shard_map(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """A dimension outside is the axes of its spec, and the dimension inside."""
        body, inside = eqn.params["jaxpr"], list[Dims]()
        for name, n in eqn.params["mesh"].shape.items():
            self._axes.setdefault(name, (int(n), self.whole([n])[0][0]))
        for dims, spec in zip(operands, eqn.params["in_specs"], strict=True):
            axes = self._split_over(dims, spec)
            inside.append([[self.table.new(self.count(dim) // self.count(over))] for dim, over in zip(dims, axes)])
            self.join(dims, [over + dim for over, dim in zip(axes, inside[-1])])
        self.settle(self.body(body, inside, numbers))
        for v, dims, spec in zip(eqn.outvars, self._results(body), eqn.params["out_specs"], strict=True):
            self.enter([v], [[over + dim for over, dim in zip(self._split_over(dims, spec), dims)]])

    def _split_over(self, dims: Dims, spec: Any) -> list[Loops]:
        """For each dimension the loops of the mesh axes of its spec."""
        entries = [*map(_names, spec), *[()] * (len(dims) - len(spec))]
        return [[self._axes[name][1] for name in names] for names in entries]


def _names(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


_BODIES = {"scan": _Reader._scan, "while": _Reader._while, "cond": _Reader._cond, "shard_map": _Reader._shard_map}
