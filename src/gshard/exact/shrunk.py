"""Smaller sizes for the dimensions of two programs, so that large programs run exactly in seconds.

Each dimension is a product of loops (``LoopTable``), which the equations of both programs join. A loop gets a smaller
size if it is part of an argument or a result, and no equation depends on its size. These stay whole: mesh axes, loops
along which an equation takes some of the elements, loops whose positions or counts meet other numbers than 0 and 1 (a
window, indices of a vocabulary), and all loops of equations that are not understood.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from gshard.core.jax_adapter import called_jaxpr, closed, scan_counts, sub_jaxprs, user_line
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Rule
from gshard.exact.positions import PASSES, Dims, Number, Numbers, has_type
from gshard.language.kernel_loops import Loops, call_of
from gshard.language.registry import rule_of
from gshard.language.traits import traits_of

SMALL = (2, 3)  # smaller sizes, in turn, so that programs that exchange two dimensions differ
MOST = 30_000  # programs with at most as many elements of all values stay as they are

# Equations that run on smaller arrays with the same parameters, but for shapes and bounds.
_SAME = frozenset(
    """argmax argmin broadcast_in_dim concatenate concatenate_slices cumlogsumexp cummax cummin cumprod cumsum
    device_put empty fft gather gshard_mark iota pad reduce reduce_max reduce_min reshape reshard rev scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub sharding_constraint slice sort split top_k""".split()
)
_EXCHANGES = frozenset("all_gather all_to_all ppermute".split())  # collectives that only move elements


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The smaller sizes. All sizes stay if nothing has been read."""

    notes: list[str] = dataclasses.field(default_factory=list)  # what became smaller, as text
    _read: _Reader = dataclasses.field(default_factory=lambda: _Reader())
    _small: Mapping[int, int] = dataclasses.field(default_factory=dict)  # the smaller sizes of leaves
    _parts: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)  # of loops, before and after

    def shape(self, v: Any) -> tuple[int, ...]:
        """The smaller shape of a variable or a literal of one of the programs."""
        if isinstance(v, Literal) or v not in self._read.dims:
            return tuple(v.aval.shape)
        return tuple(map(self._size, self._read.dims[v]))

    def length(self, eqn: Any) -> int:
        """The smaller number of iterations of a scan."""
        found = self._read.lengths.get(id(eqn))
        return int(eqn.params["length"]) if found is None else self._size(found[:1])

    def params(self, eqn: Any) -> dict[str, Any]:
        """The parameters of an equation, with the starts of slices and the paddings for the smaller sizes."""
        p, blocks = eqn.params, self._read.blocks.get(id(eqn), {})

        def scaled(bounds: Any, d: int) -> Any:
            block = blocks.get(d, [])
            return jax.tree.map(lambda n: n // max(self._read.count(block), 1) * self._size(block), bounds)

        keys = [key for key in ("start_indices", "padding_config") if key in p and blocks]
        along = {"slices": scaled(p["slices"], p["dimension"])} if "slices" in p and blocks else {}
        return {**p, **{key: tuple(map(scaled, p[key], range(len(p[key])))) for key in keys}, **along}

    def number(self, eqn: Any, i: int) -> int | None:
        """The number in place of a literal, operand ``i``, that is a size; None if the literal stays."""
        found = self._read.literals.get((id(eqn), i))
        return None if found is None else self._size(found[0]) + found[1]

    def limit(self, v: Any) -> int | None:
        """The limit of the integers of an argument that are indices of a smaller dimension; None for others."""
        loops = self._read.indices.get(v, ())
        return self._size(loops) if self._size(loops) < self._read.count(loops) else None

    def cut(self, array: Any, v: Any) -> Any:
        """The array of a variable with the smaller shape: the first elements of each loop; indices modulo the limit."""
        for d, dim in enumerate(self._read.dims.get(v, ())):
            at = np.zeros(1, int)
            for before, after in (pair for loop in dim for pair in self._pairs(loop)):
                at = (at[:, None] * before + np.arange(after)).reshape(-1)
            array = array if len(at) == array.shape[d] else array.take(at, axis=d)
        limit = self.limit(v)
        return array if limit is None else (array % limit).astype(array.dtype)

    def _pairs(self, loop: int) -> list[tuple[int, int]]:
        if loop not in self._parts:
            table = self._read.table
            leaves = table.leaves(loop) if table.sizes[loop] else [loop]
            self._parts[loop] = [(table.sizes[leaf], self._small.get(leaf, table.sizes[leaf])) for leaf in leaves]
        return self._parts[loop]

    def _size(self, dim: Sequence[int]) -> int:
        return math.prod(after for loop in dim for _, after in self._pairs(loop))


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
    dims = list(map(reader.dims_of, a.invars))
    numbers = [Number("index", (reader.table.new(0),)) if has_type(v, np.integer) else None for v in a.invars]
    for jaxpr in (plain, sharded):
        reader.settle(reader.body(jaxpr, dims, numbers))
    for x, array in zip(numbers, given, strict=False):
        if x is not None and np.size(array) and not isinstance(array, jax.ShapeDtypeStruct):
            is_index = np.min(array) >= 0 and np.max(array) < reader.count(x.loops)
            reader.settle([] if is_index else [x])
    for site in reader.fixed & reader.literals.keys():
        reader.settle([Number("offset", reader.literals.pop(site)[0])])
    for v, w in zip(a.outvars, b.outvars, strict=True):
        reader.join(reader.dims_of(v), reader.dims_of(w))
    reader.indices = {v: x.loops for body in (a, b) for v, x in zip(body.invars, numbers, strict=True) if x}
    outer = [dim for v in (*a.invars, *a.outvars) for dim in reader.dims_of(v)]
    whole, small = reader.table.whole(), dict[int, int]()
    for leaf in (leaf for dim in outer for loop in dim for leaf in reader.table.leaves(loop)):
        size = SMALL[len(small) % len(SMALL)]
        if leaf not in whole and reader.table.sizes[leaf] > size:
            small.setdefault(leaf, size)
    sizes = Sizes([], reader, small)
    changes = [(dim, "") for dim in outer]
    changes += [([loop], f" iterations of the scan at {line}") for loop, line in reader.lengths.values()]
    pairs = [(reader.count(dim), sizes._size(dim), text) for dim, text in changes]
    sizes.notes.extend(dict.fromkeys(f"{n} -> {m}{text}" for n, m, text in pairs if n != m))
    return sizes


def elements_of(*jaxprs: Any) -> int:
    """The number of elements of all values of programs."""
    total = 0
    for body, _ in map(closed, jaxprs):
        total += sum(v.aval.size for v in (*body.invars, *body.constvars))
        for eqn in body.eqns:
            total += sum(v.aval.size for v in eqn.outvars)
            total += elements_of(*sub_jaxprs(eqn.params)) * int(eqn.params.get("length", 1))
    return int(total)


class _Reader(Numbers):
    """Reads the equations of both programs, and joins their loops."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: dict[Any, Dims] = {}  # of each variable
        self.indices: dict[Any, tuple[int, ...]] = {}  # the loops that integer arguments index
        self.lengths: dict[int, tuple[int, str]] = {}  # the loop and the line of each scan, by its identity
        self.blocks: dict[int, dict[int, Loops]] = {}  # the blocks that an equation moves, by its identity
        self._axes: dict[Any, Loops] = {}  # the loop of each mesh axis

    def dims_of(self, v: Any) -> Dims:
        """The dimensions of an operand."""
        new = [[self.table.new(n)] for n in v.aval.shape]
        return new if isinstance(v, Literal) else self.dims.setdefault(v, new)

    def enter(self, variables: Sequence[Any], arrays: Iterable[Dims]) -> None:
        """Variables have these dimensions. Variables of a body that several equations share have those of all."""
        for v, dims in zip(variables, arrays, strict=True):
            self.join(self.dims_of(v), dims)

    def body(self, jaxpr: Any, operands: Sequence[Dims], numbers: Sequence[Number | None]) -> list[Number | None]:
        """Reads a jaxpr; returns what is known of the numbers of its results."""
        body = closed(jaxpr)[0]
        self.enter(body.invars, operands)
        known = dict(zip(body.invars, numbers, strict=True))
        for eqn in body.eqns:
            self.table.reading = eqn
            xs = [known.get(v) if not isinstance(v, Literal) else None if np.ndim(v.val) else
                  Number("literal", (), v.val, (id(eqn), i)) for i, v in enumerate(eqn.invars)]  # fmt: skip
            known.update(zip(eqn.outvars, self._equation(eqn, list(map(self.dims_of, eqn.invars)), xs), strict=False))
        return [None if isinstance(v, Literal) else known.get(v) for v in body.outvars]

    def _equation(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> Sequence[Number | None]:
        """Reads one equation."""
        name, called = eqn.primitive.name, called_jaxpr(eqn)
        if called is not None and len(closed(called)[0].invars) == len(operands):
            found = self.body(called, operands, numbers)
            self.enter(eqn.outvars, map(self.dims_of, closed(called)[0].outvars))
            return found
        if name == "axis_index":
            return [Number("device")]
        if name == "scan":
            self._scan(eqn, operands, numbers)
        elif name == "shard_map":
            self._shard_map(eqn, operands, numbers)
        elif name == "dynamic_slice":
            self._slice(eqn, operands, numbers)
            return self.passing(numbers[:1], "index", "position")
        elif "axis_name" in eqn.params or "axis_index_groups" in eqn.params:
            self._collective(eqn, operands)
            return self.passing(numbers, "position", *(["index"] if name in _EXCHANGES else []))
        else:
            counted = self._rule(eqn, operands, numbers)
            if traits_of(name).elementwise or name in PASSES:
                return [self.elementwise(eqn, numbers)]
            if name == "slice":
                return self.passing(numbers, "index", "position")
            if name == "scatter" and eqn.invars[1].aval.shape == (1,) and numbers[1] and numbers[1].value == 0:
                if eqn.invars[0].aval.size == eqn.invars[2].aval.size:
                    return numbers[2:3]  # one update replaces all elements
            self.settle(x for v, x in zip(eqn.invars, numbers, strict=True) if not has_type(v, np.inexact))
            if name == "iota":
                return [Number("position", tuple(self.dims[eqn.outvars[0]][eqn.params["dimension"]]))]
            return [Number("position", counted) if has_type(v, np.integer) else None for v in eqn.outvars]
        return []

    def _rule(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> tuple[int, ...]:
        """Joins loops as the rule of an equation describes; returns those along which it may count."""
        table, name = self.table, eqn.primitive.name
        rule = None if name in ("cond", "while") else rule_of(call_of(eqn), eqn.source_info)
        is_local = rule is None or not (rule.local is None or name in _SAME or traits_of(name).elementwise)
        if rule is None or is_local or rule.on_mesh is not None or not rule.is_free or eqn.effects:
            self.keep_whole(dim for v in (*eqn.invars, *eqn.outvars) for dim in self.dims_of(v))
            self.settle(numbers)
            return ()
        loops, blocks = [table.new(factor.size) for factor in rule.factors], self._blocks_of(eqn, rule, numbers)
        kinds = [factor.monoid if factor.kind == REDUCE else factor.kind for factor in rule.factors]
        looked_up = self.looked_up(eqn, operands, numbers)
        found = set() if looked_up is None else set(rule.operands[0][looked_up])
        stays = {f for f, kind in enumerate(kinds) if kind in ("pick", COMMUNICATE, REPLICATE)} - found
        table.keep_whole(loops[f] for f in stays)
        if name.startswith("scatter"):  # along dimensions that updates do not cover, they are at positions
            found |= {f for own in rule.operands[2] for f in own}
            table.keep_whole(loops[f] for own in rule.operands[0] for f in own if f not in found)
        for v, own in zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True):
            for d, (dim, fs) in enumerate(zip(self.dims_of(v), own, strict=True)):
                if d in blocks:
                    count = self.count(dim) // max(self.count(blocks[d]), 1)
                    self.join([dim], [[*self.whole([count])[0], *blocks[d]]])
                elif fs:
                    self.join([dim], [[loops[f] for f in fs]])
        counted = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != PARALLEL]
        if has_type(eqn.outvars[0], np.inexact) and numbers and None not in numbers and not blocks:
            table.keep_whole(counted)  # no data is part of the result
        return tuple(counted)

    def _blocks_of(self, eqn: Any, rule: Rule, numbers: list[Number | None]) -> dict[int, Loops]:
        """The blocks of elements that an equation moves along dimensions: all bounds are multiples of their size."""
        blocks = self.blocks.setdefault(id(eqn), {}) if rule.index else dict[int, Loops]()
        for d in range(eqn.outvars[0].aval.ndim if rule.index else 0):
            if spans := [span for index in rule.index or () for span in index[d]]:
                bounds = [n for span in spans for n in (span.start, span.count)]
                bounds += [v.aval.shape[d] for v in (*eqn.invars, *eqn.outvars) if v.aval.ndim]
                blocks.setdefault(d, [self.table.new(math.gcd(*bounds))])
                moved = [span.start and (x := numbers[span.operand]) and x.kind == "position" for span in spans]
                if any(moved) or any(span.step > 1 for span in spans):
                    self.keep_whole([blocks[d]])
        return blocks

    def _collective(self, eqn: Any, operands: list[Dims]) -> None:
        """Collectives keep shapes, but for a dimension that is gathered or cut: the parts are its major loop."""
        p, dims, groups = eqn.params, list(operands[0]), eqn.params.get("axis_index_groups")
        gathers = p.get("all_gather_dimension", p.get("concat_axis"))
        cuts = p.get("scatter_dimension", p.get("split_axis"))
        if p.get("tiled"):
            parts = len(groups[0]) if groups else math.prod(self.count(self._axes[a]) for a in _names(p["axis_name"]))
            (axis,) = self.whole([parts])
            if cuts is not None:
                inner = [self.table.new(self.count(dims[cuts]) // parts)]
                self.join([dims[cuts]], [[*axis, *inner]])
                dims[cuts] = inner
            if gathers is not None:
                dims[gathers] = [*axis, *dims[gathers]]
            self.enter(eqn.outvars, [dims])
        elif gathers is None and cuts is None and len(operands) == len(eqn.outvars):
            self.enter(eqn.outvars, operands)
        else:
            self.keep_whole(dim for v in (*eqn.invars, *eqn.outvars) for dim in self.dims_of(v))

    def _slice(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """A slice at positions known at run time. Each device may take the part at its offset."""
        for dim, part, start in zip(operands[0], self.dims_of(eqn.outvars[0]), numbers[1:], strict=True):
            n, m = self.count(dim), self.count(part)
            if n == m:
                self.join([dim], [part])
            elif start and start.kind == "offset" and self.count(start.loops) == m and n % m == 0:
                self.join([part, dim], [list(start.loops), [*self.whole([n // m])[0], *start.loops]])
            else:
                self.settle([start])
                self.keep_whole([dim, part])

    def _scan(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """The iterations are a loop. It stays whole if nothing is scanned over, or if iterations are counted."""
        body, (consts, carry) = eqn.params["jaxpr"], scan_counts(eqn.params)
        first, length = consts + carry, self.table.new(int(eqn.params["length"]))
        loop = [self.lengths.setdefault(id(eqn), (length, user_line(eqn.source_info)))[0]]
        if first == len(operands) or any(
            has_type(v, np.integer) and not v.aval.shape for v in eqn.invars[consts:first]
        ):
            self.keep_whole([loop])
        self.join([dims[0] for dims in operands[first:]], [loop] * len(operands[first:]))
        self.settle(numbers[consts:first])
        numbers[consts:first] = [None] * carry
        self.settle(self.body(body, [*operands[:first], *(dims[1:] for dims in operands[first:])], numbers))
        results = list(map(self.dims_of, closed(body)[0].outvars))
        self.enter(closed(body)[0].invars[consts:first], results[:carry])
        self.enter(eqn.outvars, [*operands[consts:first], *([loop, *dims] for dims in results[carry:])])

    def _shard_map(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """A dimension outside is the axes of its spec, and the dimension inside."""
        body = eqn.params["jaxpr"]
        for name, n in eqn.params["mesh"].shape.items():
            self._axes.setdefault(name, self.whole([int(n)])[0])
        inside = list(map(self.dims_of, closed(body)[0].invars))
        self.settle(self.body(body, inside, numbers))
        inside += map(self.dims_of, closed(body)[0].outvars)
        specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
        outside = (*operands, *map(self.dims_of, eqn.outvars))
        for dims, parts, spec in zip(outside, inside, specs, strict=True):
            names = [*map(_names, spec), *[()] * (len(dims) - len(spec))]
            self.join(dims, [[*(self._axes[a][0] for a in own), *part] for own, part in zip(names, parts)])


def _names(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
