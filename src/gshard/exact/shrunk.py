"""Smaller sizes for the dimensions of two programs, so that large programs run exactly in seconds.

Each dimension is a product of loops (``LoopTable``), which the equations of both programs join. A loop gets a smaller
size if it is part of an argument or a result, and no equation depends on its size. These stay whole: mesh axes, loops
along which an equation takes some of the elements, loops whose positions or counts meet other numbers than 0 and 1 (a
window, indices of a vocabulary), and all loops of equations that are not understood.

Integers may be positions along loops. A comparison of two positions means the same for all sizes, that of a position
with the number 100 does not. The offset of a device's part, ``axis_index * size``, is right only if the literal changes
with the size of the part.
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
from gshard.language.kernel_loops import Loops, LoopTable, call_of
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

Dims = list[Loops]

# Equations whose result has the numbers of the operand.
_PASSES = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p expand_dims gshard_mark pvary reshape reshard
    sharding_constraint squeeze stop_gradient transpose""".split()
)
_COMPARES = frozenset("eq ne lt le gt ge".split())
_LINEAR = frozenset("add sub neg max min clamp select_n".split())


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """What is known of the numbers of a value.

    They are functions of a ``device``; an ``offset``, a multiple of the size of loops; a ``position`` along loops, or a
    count along them; an ``index``, a position that is given, less an offset or moved by 1; or a ``literal``.
    """

    kind: str
    loops: tuple[int, ...] = ()  # the loops on whose sizes they depend
    value: Any = None  # of a literal, and where it is: its equation and the number of the operand
    site: tuple[int, int] = (0, 0)


_ANY = Number("")  # numbers that depend on no size


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
            sizes = ((leaf, table.sizes[leaf]) for leaf in table.leaves(loop))
            self._parts[loop] = [(n, self._small.get(leaf, n)) for leaf, n in sizes]
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
    numbers = [Number("index", (reader.table.new(0),)) if _has_type(v, np.integer) else None for v in a.invars]
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


class _Reader:
    """Reads the equations of both programs, and joins their loops."""

    def __init__(self) -> None:
        self.table = LoopTable()  # the loops
        self.dims: dict[Any, Dims] = {}  # of each variable
        self.indices: dict[Any, tuple[int, ...]] = {}  # the loops that integer arguments index
        self.lengths: dict[int, tuple[int, str]] = {}  # the loop and the line of each scan, by its identity
        self.blocks: dict[int, dict[int, Loops]] = {}  # the blocks that an equation moves, by its identity
        # The loops whose size a literal is, less a number, by its equation and operand; and literals that stay.
        self.literals: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.fixed: set[tuple[int, int]] = set()

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
            if traits_of(name).elementwise or name in _PASSES:
                return [self.elementwise(eqn, numbers)]
            if name == "slice":
                return self.passing(numbers, "index", "position")
            if name == "scatter" and eqn.invars[1].aval.shape == (1,) and numbers[1] and numbers[1].value == 0:
                if eqn.invars[0].aval.size == eqn.invars[2].aval.size:
                    return numbers[2:3]  # one update replaces all elements
            self.settle(x for v, x in zip(eqn.invars, numbers, strict=True) if not _has_type(v, np.inexact))
            if name == "iota":
                return [Number("position", tuple(self.dims[eqn.outvars[0]][eqn.params["dimension"]]))]
            return [Number("position", counted) if _has_type(v, np.integer) else None for v in eqn.outvars]
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
                    self.join_part(dim, blocks[d])
                elif fs:
                    self.join([dim], [[loops[f] for f in fs]])
        counted = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != PARALLEL]
        if _has_type(eqn.outvars[0], np.inexact) and numbers and None not in numbers and not blocks:
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
        """A collective keeps a dimension, joins parts of devices, or takes one of these."""
        results, p = list(map(self.dims_of, eqn.outvars)), eqn.params
        if "split_axis" in p and p["split_axis"] == p["concat_axis"]:  # parts of a dimension change places
            self.keep_whole([operands[0][p["split_axis"]]])
        if list(map(len, operands)) != list(map(len, results)):
            self.keep_whole(dim for dims in (*operands, *results) for dim in dims)
        for dims, others in zip(operands, results, strict=False):
            for some, other in zip(dims, others, strict=False):
                self.join_part(some, other)

    def _slice(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """A slice at positions known at run time. Each device may take the part at its offset."""
        for dim, part, start in zip(operands[0], self.dims_of(eqn.outvars[0]), numbers[1:], strict=True):
            if start and start.kind == "offset" and self.count(start.loops) == self.count(part):
                self.join([part], [list(start.loops)])
                self.join_part(dim, part)
            elif self.count(dim) == self.count(part):
                self.join([dim], [part])
            else:
                self.settle([start])
                self.keep_whole([dim, part])

    def _scan(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> None:
        """The iterations are a loop. It stays whole if nothing is scanned over, or if iterations are counted."""
        body, (consts, carry) = eqn.params["jaxpr"], scan_counts(eqn.params)
        first, length = consts + carry, self.table.new(int(eqn.params["length"]))
        loop = [self.lengths.setdefault(id(eqn), (length, user_line(eqn.source_info)))[0]]
        if first == len(operands) or any(
            _has_type(v, np.integer) and not v.aval.shape for v in eqn.invars[consts:first]
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
        """A dimension outside is as many of those inside as there are parts."""
        body = eqn.params["jaxpr"]
        inside = list(map(self.dims_of, closed(body)[0].invars))
        self.settle(self.body(body, inside, numbers))
        inside += map(self.dims_of, closed(body)[0].outvars)
        for dims, parts in zip((*operands, *map(self.dims_of, eqn.outvars)), inside, strict=True):
            for dim, part in zip(dims, parts, strict=True):
                self.join_part(dim, part)

    # What is known of the numbers of values.

    def whole(self, n: int) -> int:
        """A new loop that stays whole."""
        self.table.keep_whole([loop := self.table.new(n)])
        return loop

    def keep_whole(self, dims: Iterable[Loops]) -> None:
        """These dimensions stay whole."""
        self.table.keep_whole(loop for dim in dims for loop in dim)

    def join(self, some: Sequence[Loops], others: Sequence[Loops]) -> None:
        """These dimensions are the same."""
        for a, b in zip(some, others, strict=True):
            if self.count(a) == self.count(b) != 0:
                self.table.join(a, b)
            else:
                self.keep_whole((a, b))

    def join_part(self, some: Sequence[int], other: Sequence[int]) -> None:
        """One of two dimensions is a whole number of parts that are like the other one."""
        part, whole = sorted((some, other), key=self.count)
        n = self.count(whole) // max(self.count(part), 1)
        self.join([list(whole)], [[self.whole(n), *part]])

    def count(self, dim: Sequence[int]) -> int:
        """The size of a dimension."""
        return math.prod(self.table.sizes[loop] for loop in dim)

    def settle(self, numbers: Iterable[Number | None]) -> None:
        """The loops of these numbers stay whole, and these literals stay."""
        for x in numbers:
            if x is not None:
                self.table.keep_whole(x.loops)
                self.fixed |= {x.site} if x.kind == "literal" else set()

    def are_positions(self, x: Number, n: int) -> bool:
        """Whether numbers are positions among ``n`` elements; the first use of an index determines its range."""
        if x.kind == "index" and self.count(x.loops) == 0:
            self.table.sizes[x.loops[0]] = n
        return x.kind in ("index", "position") and self.count(x.loops) == n

    def _scales(self, literal: Number, x: Number) -> bool:
        """Whether a literal is the size of loops, or next to it. Then it changes with the size."""
        c, loops = int(literal.value), list(x.loops)
        if x.kind == "offset" and c > 1 and c % self.count(loops) == 0:
            loops = [self.whole(c // self.count(loops)), *loops]
        delta = 0 if x.kind == "index" and self.are_positions(x, c) else c - self.count(loops)
        if c < 2 or abs(delta) > (x.kind != "offset"):
            return c == 0 or (abs(c) == 1 and x.kind != "offset")
        before, of_before = self.literals.setdefault(literal.site, (tuple(loops), delta))
        self.join([list(before)], [loops])
        return of_before == delta

    def passing(self, numbers: Sequence[Number | None], *kinds: str) -> list[Number | None]:
        """Numbers of these kinds pass; the others are settled."""
        found = [x if x is not None and x.kind in kinds else None for x in numbers]
        self.settle(x for x, y in zip(numbers, found, strict=True) if y is None)
        return found

    def looked_up(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> int | None:
        """The dimension of the operand along which indices are positions, for a look-up of single elements."""
        given: Any = eqn.params.get("dimension_numbers")
        dims: Sequence[int] = getattr(given, "start_index_map", getattr(given, "scatter_dims_to_operand_dims", ()))
        single = getattr(given, "collapsed_slice_dims", getattr(given, "inserted_window_dims", ()))
        if len(dims) != 1 or not set(dims) <= set(single) or (indices := numbers[1]) is None:
            return None
        dim = operands[0][dims[0]]
        if not self.are_positions(indices, self.count(dim)):
            return None
        self.join([dim], [list(indices.loops)])
        numbers[1] = None
        return int(dims[0])

    def elementwise(self, eqn: Any, numbers: Sequence[Number | None]) -> Number | None:
        """What is known of the result of an elementwise equation. Loops stay whole if numbers are used otherwise."""
        same_type = _has_type(eqn.invars[0], np.inexact) == _has_type(eqn.outvars[0], np.inexact)
        if eqn.primitive.name in _PASSES and same_type and eqn.outvars[0].aval.dtype.itemsize >= 4:
            return numbers[0]  # a narrower type may not have all of them
        known = [x for x in numbers if x is not None and x.kind != "literal"]
        found = self._understood(eqn, numbers, known) if known else None
        if found is None:
            self.settle(numbers)
        return None if found == _ANY else found

    def _understood(self, eqn: Any, numbers: Sequence[Number | None], known: list[Number]) -> Number | None:
        """What is known of the numbers of the result; None if the equation is not understood."""
        name, x, y = eqn.primitive.name, known[0], known[-1]
        literals = [c for c in numbers if c is not None and c.kind == "literal"]
        kinds, loops = {x.kind for x in known}, tuple(loop for x in known for loop in x.loops)
        of_data, compares = len(known) + len(literals) < len(numbers), name in _COMPARES
        if _has_type(eqn.outvars[0], np.inexact):
            return None if kinds != {"position"} else _ANY if of_data else Number("position", loops)
        if name in _PASSES or any(_has_type(v, np.inexact) for v in eqn.invars):
            return None
        if name == "mul" and kinds <= {"device", "offset"} and len(literals) == 1 and (c := literals[0]).value > 0:
            self.settle(known)
            size, delta = self.literals.setdefault(c.site, ((self.table.new(int(c.value)),), 0))
            return None if delta else x if c.value == 1 else Number("offset", size)
        if "device" in kinds and kinds <= {"device", "offset"}:
            self.settle(known)
            return _ANY if of_data else Number("device")
        if name == "add" and x.kind == "offset":
            x, y = y, x
        if name in ("add", "sub") and len(known) == 2 and y.kind == "offset" != x.kind:
            n, part = self.count(x.loops), self.count(y.loops)
            if name == "add" and x.kind == "position" and n == part:
                self.join([list(x.loops)], [list(y.loops)])
                return Number("position", loops)
            if name == "add" or x.kind not in ("index", "position") or not n > part > n % part == 0:
                return None
            self.join_part(x.loops, y.loops)
            return Number("index", y.loops)
        is_choice = name == "select_n" and numbers[0] is None and len(known) + len(literals) == 2
        if (of_data and not is_choice) or name not in _COMPARES | _LINEAR:
            return None
        if kinds == {"position"} and all(abs(c.value) <= 1 for c in literals):
            return _ANY if compares else Number("position", loops)
        if kinds != {"offset"} and not kinds <= {"index", "position"}:
            return None
        n = max(self.count(y.loops) for y in known)
        for y in known:
            if y.loops != x.loops:
                if not (n and (kinds == {"offset"} or (self.are_positions(x, n) and self.are_positions(y, n)))):
                    return None
                self.join([list(x.loops)], [list(y.loops)])
        if not all([self._scales(c, x) for c in literals]):
            return None
        return _ANY if compares else Number("offset" if kinds == {"offset"} else "index", x.loops)


def _has_type(v: Any, kind: Any) -> bool:
    return bool(jax.dtypes.issubdtype(v.aval.dtype, kind))
