"""Runs jaxprs on arrays of lanes: regions, calls, and ``shard_map`` with its collectives, for all devices together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.core.planning_tables import tabulated
from gshard.core.rule import PARALLEL
from gshard.exact.combining import as_reduced, folded, padded_windows
from gshard.exact.movement import grouped
from gshard.exact.numbers import Field, Reals, Value
from gshard.exact.operations import (
    OPERATORS,
    Complex,
    Operation,
    Undecided,
    is_float,
    log_of_sum,
    moved,
)
from gshard.exact.shrunk import Sizes
from gshard.language.attention_primitive import IN_BLOCKS
from gshard.language.kernel_loops import call_of
from gshard.language.registry import has_rule, rule_of
from gshard.tracing.partly_manual import manual_axes_of

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Unequal:
    """A result that differs between devices, although ``out_specs`` calls it replicated."""

    eqn: Any  # the ``shard_map``
    number: int  # of the result
    axis: str  # along which parts differ


@dataclasses.dataclass
class Interpreter:
    """Runs jaxprs in one domain."""

    domain: Field | Reals
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    most_iterations: int = 10_000  # of a while loop
    axes: Axes = ()  # the manual axes of the mesh; lanes are draws, then devices in the order of these axes
    trusts_rules: bool = True  # operators without an exact value are functions along what their rules call parallel
    equations: int = 0  # how many have run
    unequal: list[Unequal] = dataclasses.field(default_factory=list)
    # of an equation and the shapes of its operands: a jaxpr to run instead
    instead: Callable[[Any, Sequence[tuple[int, ...]]], Any] | None = None

    @property
    def lanes(self) -> int:
        """How many lanes arrays have."""
        return self.domain.draws * math.prod(n for _, n in self.axes)

    def constant(self, x: Any, v: Any = None) -> Value:
        """An array of the program."""
        if _is_key(x.dtype if hasattr(x, "dtype") else None):
            return self.constant(_packed(x), v)
        array = np.asarray(x)
        array = array if v is None else self.sizes.cut(array, v)
        if jax.dtypes.issubdtype(array.dtype, np.complexfloating):
            return Complex(*(self.constant(part.copy()) for part in (array.real, array.imag)))
        wanted = (self.lanes, *array.shape)
        if jax.dtypes.issubdtype(array.dtype, np.floating):
            made = self.domain.constant(np.asarray(array, np.float64)[None], array.dtype)
            return moved(lambda a: np.broadcast_to(a, wanted), made)
        return np.broadcast_to(array, wanted)

    def run(self, jaxpr: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of a (closed) jaxpr, whose open constvars come first among the operands."""
        body, consts = jax_adapter.closed(jaxpr)
        held = [self.constant(c, v) for c, v in zip(consts, body.constvars, strict=bool(consts))]
        free = len(body.constvars) - len(held)
        return jax_adapter.evaluate(
            body, [*held, *operands[:free]], operands[free:], self._equation, lambda v: self._literal(v)
        )

    def _literal(self, v: Any) -> Value:
        return self.constant(np.asarray(v.val, v.aval.dtype))

    def _equation(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        self.equations += 1
        operands = list(operands)
        for i, v in enumerate(eqn.invars):
            if isinstance(v, core.Literal) and (number := self.sizes.number(eqn, i)) is not None:
                operands[i] = self.constant(np.asarray(number, np.asarray(v.val).dtype))
        try:
            with np.errstate(all="ignore"):
                results = self._results(eqn, operands)
        except Undecided as error:
            if isinstance(self.domain, Reals) and not self.trusts_rules and eqn.primitive.name not in _REGIONS:
                return self.by_jax(eqn, operands)
            if error.where is None:
                raise Undecided(error.what, jax_adapter.user_line(eqn.source_info)) from None
            raise
        return results

    def _results(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if not eqn.outvars:  # a debug print
            return []
        if name in _REGIONS:
            return _REGIONS[name](self, eqn, operands)
        if name in (*_REDUCES, *_MOVES, "axis_index") and not jax_adapter.sub_jaxprs(eqn.params):
            return _collective(self, eqn, operands)
        if name in _ON_KEYS:
            return [_ON_KEYS[name](self, eqn, *operands)]
        if self.instead is not None and (other := self.instead(eqn, [x.shape[1:] for x in operands])) is not None:
            return self.run(other, operands)
        if name in OPERATORS:
            found = OPERATORS[name](self._operation(eqn), *operands)
            return found if isinstance(found, list) else [found]
        if (called := jax_adapter.called_jaxpr(eqn)) is not None:
            if jax_adapter.name_of_function(called) == "logaddexp" and is_float(operands[0]):
                return [log_of_sum(self._operation(eqn), *operands)]
            return self.run(called, operands)
        if not any(is_float(x) or isinstance(x, Complex) for x in operands):
            return self.by_jax(eqn, operands)
        o = self._operation(eqn)
        if name == "gshard_kernel" and self.trusts_rules:
            self.domain.identities.add("kernels compute what their plain functions do")
            plain = eqn.params["kernel"].plain_jaxpr(tuple(zip(o.in_shapes, o.in_dtypes, strict=True)))
            return self.run(plain, operands)
        if (opened := _opened(eqn, o.in_shapes, o.in_dtypes, o.shapes)) is not None:
            return self.run(opened, operands)
        if not self.trusts_rules:
            raise Undecided(f"'{name}' has no exact value.")
        return self._of_rows(eqn, operands)

    def _operation(self, eqn: Any) -> Operation:
        shape = self.sizes.shape
        ins, outs = eqn.invars, eqn.outvars
        return Operation(
            eqn.primitive.name,
            self.sizes.params(eqn),
            tuple(() if isinstance(v, core.Literal) else shape(v) for v in ins),
            tuple(map(shape, outs)),
            tuple(v.aval.dtype for v in ins),
            tuple(v.aval.dtype for v in outs),
            self.domain,
            self.lanes,
        )

    def by_jax(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of an equation, which JAX runs once for each different lane."""
        avals, results = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        variables = [v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, core.Literal)]
        is_smaller = any(self.sizes.shape(v) != tuple(v.aval.shape) for v in variables)
        if is_smaller and not any(_is_key(a.dtype) for a in (*avals, *results)):
            raise Undecided(f"'{eqn.primitive.name}' cannot be run at another size.")
        seen: dict[bytes, list[Any]] = {}
        rows = []
        for lane in range(self.lanes):
            local = [_of_lane(x, lane if x.shape[0] > 1 else 0, aval) for x, aval in zip(operands, avals, strict=True)]
            key = b"".join(np.ascontiguousarray(x).tobytes() for x in local)
            if key not in seen:
                arrays = [_unpacked(x, a) if _is_key(a.dtype) else x for x, a in zip(local, avals, strict=True)]
                found = jax_adapter.bind(eqn.primitive, eqn.params, arrays)
                seen[key] = [_packed(r) if _is_key(r.dtype) else np.asarray(r) for r in found]
            rows.append(seen[key])
        return [self._from_bits(np.stack(parts)) for parts in zip(*rows, strict=True)]

    def _from_bits(self, x: np.ndarray) -> Value:
        if jax.dtypes.issubdtype(x.dtype, np.complexfloating):
            return Complex(self.domain.from_bits(x.real), self.domain.from_bits(x.imag))
        return self.domain.from_bits(x) if jax.dtypes.issubdtype(x.dtype, np.floating) else x

    def _of_rows(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of an operator that is an unknown function of each row of its parallel dimensions."""
        name = eqn.primitive.name
        if not has_rule(name, eqn.params) or name.endswith("_callback"):
            raise Undecided(f"'{name}' has no exact value and no rule.")
        o = self._operation(eqn)
        call = dataclasses.replace(call_of(eqn), in_shapes=o.in_shapes, out_shapes=o.shapes)
        rule = rule_of(call, eqn.source_info)
        if rule.fixed is not None or rule.manual is not None:
            raise Undecided(f"'{name}' cannot be run exactly.")
        parallel = [f for f, factor in enumerate(rule.factors) if factor.kind == PARALLEL]

        d: Any = self.domain

        def order(dims: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
            rows = {dim[0]: d for d, dim in enumerate(dims, 1) if len(dim) == 1 and dim[0] in parallel}
            if set(rows) != set(parallel):
                raise Undecided(f"'{name}' cannot be run exactly.")
            return [rows[f] for f in parallel], [d for d in range(1, len(dims) + 1) if d not in rows.values()]

        def row(x: Value) -> Value:
            numbers = d.sum(d.function("row", x, np.broadcast_to(np.arange(x.shape[2]), x.shape), spreads=False), (2,))
            return moved(lambda v: v[:, :, None], numbers)

        if any(isinstance(x, Complex) for x in operands):
            raise Undecided(f"'{name}' of complex numbers has no exact value.")
        rows = [row(grouped(x, *order(dims))) for x, dims in zip(operands, rule.operands, strict=True)]
        results = []
        for i, (shape, dtype, dims) in enumerate(zip(o.shapes, o.dtypes, rule.results, strict=True)):
            of_rows, others = order(dims)
            places = np.arange(math.prod(shape[d - 1] for d in others)).reshape(1, 1, -1) + (i << 32)
            x = d.function(_text(name, eqn.params), *rows, places)
            if not jax.dtypes.issubdtype(dtype, np.inexact):
                x = d.compare(np.greater, x, d.from_ints(np.zeros((1, 1, 1)))).astype(dtype)
            back = [0, *(d + 1 for d in np.argsort([*of_rows, *others]))]
            sizes = [shape[d - 1] for d in (*of_rows, *others)]
            results.append(moved(lambda v, s=sizes, b=back: v.reshape(len(v), *s).transpose(b), x))
        return results


def _text(name: str, params: dict[str, Any]) -> str:
    """A name of an operator with its parameters."""
    return f"{name} {[(k, str(v)) for k, v in sorted(params.items()) if k not in ('sharding', 'out_sharding', 'vma')]}"


@tabulated(4096)
def _opened(eqn: Any, in_shapes: Sequence[Any], in_dtypes: Sequence[Any], shapes: Sequence[Any]) -> Any:
    """The jaxpr of an operator that a Python function of JAX operators defines; None for others."""
    name = eqn.primitive.name
    if name == "custom_partitioning" and in_shapes == tuple(x.shape for x in eqn.params["call"].in_avals):
        return eqn.params["call"]
    function = IN_BLOCKS.get(name) or jax_adapter.function_of(eqn.primitive)
    if function is None:
        return None
    avals = [jax.ShapeDtypeStruct(*x) for x in zip(in_shapes, in_dtypes, strict=True)]
    try:
        opened = jax.make_jaxpr(functools.partial(function, **eqn.params))(*avals)
    except Exception:  # it needs more than shapes, or these shapes
        return None
    body = jax_adapter.closed(opened)[0]
    is_other = name not in {e.primitive.name for e in body.eqns}
    return opened if is_other and tuple(tuple(v.aval.shape) for v in body.outvars) == shapes else None


# --- regions


def _scan(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    body, length, backwards = eqn.params["jaxpr"], run.sizes.length(eqn), eqn.params["reverse"]
    num_consts, num_carry = jax_adapter.scan_counts(eqn.params)
    consts, carry = list(operands[:num_consts]), list(operands[num_consts:][:num_carry])
    xs = operands[num_consts + num_carry :]
    collected: list[list[Value]] = []
    for i in range(length)[:: -1 if backwards else 1]:
        slices = [moved(lambda v, i=i: v[:, i], x) for x in xs]
        results = run.run(body, [*consts, *carry, *slices])
        carry = results[:num_carry]
        collected.append(results[num_carry:])
    if backwards:
        collected.reverse()
    stacked = []
    for n, v in enumerate(eqn.outvars[num_carry:]):
        if collected:
            stacked.append(moved(lambda *rows: np.stack(np.broadcast_arrays(*rows), 1), *(r[n] for r in collected)))
        else:
            stacked.append(run.constant(np.zeros(run.sizes.shape(v), v.aval.dtype)))
    return [*carry, *stacked]


def _while(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = list(operands[second:])
    for _ in range(run.most_iterations):
        (goes_on,) = run.run(params["cond_jaxpr"], [*operands[:first], *carry])
        if not goes_on.any():
            return carry
        _refuse_apart(run, goes_on, (params["cond_jaxpr"], params["body_jaxpr"]))
        results = run.run(params["body_jaxpr"], [*operands[first:second], *carry])
        carry = [_where(goes_on, new, old) for new, old in zip(results, carry, strict=True)]
    raise Undecided(f"a while loop runs more than {run.most_iterations} times.")


def _refuse_apart(run: Interpreter, chosen: np.ndarray, bodies: Sequence[Any]) -> None:
    """Refuses loops and branches with collectives that not all of their devices run: they would wait forever."""
    over = frozenset[str]().union(*map(_communicates, bodies))
    by_draw = _full_lanes(chosen, run.lanes).reshape(run.domain.draws, *(size for _, size in run.axes))
    first = tuple(slice(0, 1) if name in over else slice(None) for name, _ in run.axes)
    if (by_draw != by_draw[:, *first]).any():
        raise Undecided(
            "devices leave a loop or take a branch apart, and there is a collective inside: they would wait."
        )


@tabulated(1024)
def _communicates(jaxpr: Any) -> frozenset[str]:
    """The axes over which a jaxpr has collectives."""
    found = set[str]()
    for eqn in jax_adapter.closed(jaxpr)[0].eqns:
        if eqn.primitive.name in (*_REDUCES, *_MOVES):
            found.update(map(str, _named(eqn.params)))
        found.update(*map(_communicates, jax_adapter.sub_jaxprs(eqn.params)))
    return frozenset(found)


def _where(condition: np.ndarray, new: Value, old: Value) -> Value:
    if condition.all():
        return new
    shape = (*condition.shape, *(1,) * (new.ndim - condition.ndim))
    return moved(lambda a, b: np.where(condition.reshape(shape), a, b), new, old)


def _reduce(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """A reduction by a function, of dimensions or of windows. What is padded does not count."""
    count, o = len(operands) // 2, run._operation(eqn)
    arrays, starts, axes = operands[:count], operands[count:], [d + 1 for d in eqn.params.get("dimensions", ())]
    counts = np.ones(operands[0].shape, bool)
    if o.name == "reduce_window":
        arrays = [padded_windows(o, x, start) for x, start in zip(arrays, starts, strict=True)]
        counts, axes = padded_windows(o, counts, np.zeros(run.lanes, bool)), list(range(2, arrays[0].ndim, 2))
    shape = (run.lanes, *o.shape)
    starts = [moved(lambda v: np.broadcast_to(v.reshape(-1, *(1,) * len(o.shape)), shape), x) for x in starts]

    def combine(a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        both = run.run(eqn.params["jaxpr"], [*a[1:], *b[1:]]) if (a[0] & b[0]).any() else a[1:]
        pairs = (_where(b[0], _where(a[0], z, y), x) for x, y, z in zip(a[1:], b[1:], both, strict=True))
        return [a[0] | b[0], *pairs]

    if all(arrays[0].shape[d] for d in axes):
        starts = combine([np.ones(shape, bool), *starts], folded(combine, [counts, *arrays], axes))[1:]
    return starts


def _cond(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    branches = eqn.params["branches"]
    chosen = np.clip(operands[0], 0, len(branches) - 1)
    taken = [int(i) for i in np.unique(chosen)]
    _refuse_apart(run, chosen, [branches[i] for i in taken])
    results = run.run(branches[taken[0]], operands[1:])
    for i in taken[1:]:
        others = run.run(branches[i], operands[1:])
        results = [_where(chosen == i, new, old) for new, old in zip(others, results, strict=True)]
    return results


def _shard_map(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    params, outer = eqn.params, run.axes
    mesh = params["mesh"]
    manual = manual_axes_of(params)
    outside = {name for name, _ in outer}
    inner: Axes = tuple((a, mesh.shape[a]) for a in mesh.axis_names if a in manual and a not in outside)
    axes = (*outer, *inner)
    lanes = run.lanes
    count = math.prod(n for _, n in inner)
    try:
        run.axes = axes
        parts = [
            moved(functools.partial(cut, axes=inner, spec=_entries(spec)), x)
            for x, spec in zip(operands, params["in_specs"], strict=True)
        ]
        results = run.run(params["jaxpr"], parts)
    finally:
        run.axes = outer
    whole = []
    for i, (x, spec) in enumerate(zip(results, params["out_specs"], strict=True)):
        entries = _entries(spec)
        used = [a for dim in entries for a in dim]
        x = moved(functools.partial(_full_lanes, lanes=lanes * count), x)
        for position, (name, size) in enumerate(inner):
            if name not in used and size > 1:
                _check_equal(run, eqn, i, x, lanes, inner, position)
        whole.append(moved(functools.partial(_joined, axes=inner, spec=entries, lanes=lanes), x))
    return whole


def _full_lanes(v: np.ndarray, lanes: int) -> np.ndarray:
    return v if len(v) == lanes else np.broadcast_to(v, (lanes, *v.shape[1:]))


def _entries(spec: Any) -> list[tuple[str, ...]]:
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    return [tuple(a for a in e if isinstance(a, str)) for e in entries]


def cut(v: np.ndarray, axes: Axes, spec: Sequence[tuple[str, ...]]) -> np.ndarray:
    """The part of each device: ``[lanes, ...] -> [lanes * devices, ...]``."""
    sizes, devices = dict(axes), math.prod(n for _, n in axes)
    position = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(axes), devices), strict=True))
    at: list[Any] = [slice(None), np.zeros((devices, *(1,) * (v.ndim - 1)), np.int64)]
    shape: list[int] = []
    for d, n in enumerate(v.shape[1:]):
        part, count = np.zeros(devices, np.int64), 1
        for a in spec[d] if d < len(spec) else ():
            if a in sizes:
                part, count = part * sizes[a] + position[a], count * sizes[a]
        shape.append(n // count)
        places = part[:, None] * shape[d] + np.arange(shape[d])
        at.append(places.reshape(devices, *(shape[d] if e == d else 1 for e in range(v.ndim - 1))))
    return v[:, None][tuple(at)].reshape(len(v) * devices, *shape)


def _joined(v: np.ndarray, axes: Axes, spec: Sequence[tuple[str, ...]], lanes: int) -> np.ndarray:
    """The inverse of ``cut``."""
    sizes = dict(axes)
    names = [[a for a in dim if a in sizes] for dim in spec] + [[]] * v.ndim
    shape = [n * math.prod(sizes[a] for a in dim) for n, dim in zip(v.shape[1:], names, strict=False)]
    places = cut(np.arange(math.prod(shape)).reshape(1, *shape), axes, spec).ravel()
    at = np.empty(math.prod(shape), np.int64)
    at[places[::-1]] = np.arange(len(places))[::-1]  # the first device that has an element
    return v.reshape(lanes, -1)[:, at].reshape(lanes, *shape)


def _check_equal(run: Interpreter, eqn: Any, i: int, x: Value, lanes: int, axes: Axes, position: int) -> None:
    """All devices along an axis must have the same part of a replicated result."""
    shape = (lanes, *(n for _, n in axes), *x.shape[1:])
    split = moved(lambda v: v.reshape(shape), x)
    first = moved(lambda v: np.broadcast_to(v.take([0], 1 + position), shape), split)
    pairs = [(split.real, first.real), (split.imag, first.imag)] if isinstance(x, Complex) else [(split, first)]
    if any(run.domain.differs(*pair).any() for pair in pairs):
        run.unequal.append(Unequal(eqn, i, axes[position][0]))


_REGIONS: dict[str, Callable[[Interpreter, Any, Sequence[Value]], list[Value]]] = {
    "scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map, "reduce": _reduce,
    "reduce_window": _reduce,
}  # fmt: skip


# --- random keys: two words of 32 bits in one of 64


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _packed(keys: Any) -> np.ndarray:
    return _of_words(np.asarray(jax.random.key_data(keys)))


def _of_words(data: np.ndarray) -> np.ndarray:
    if data.shape[-1] != 2:
        raise Undecided("random keys of more than 64 bits have no exact value.")
    return np.asarray(data[..., 0].astype(np.uint64) << np.uint64(32) | data[..., 1])


def _words(x: np.ndarray) -> np.ndarray:
    return np.stack([x >> np.uint64(32), x & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)


def _unpacked(x: np.ndarray, aval: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(_words(x)), impl=jax_adapter.impl_of_keys(aval))


def _of_lane(x: Value, lane: int, aval: Any) -> np.ndarray:
    if isinstance(x, Complex):
        return np.asarray(x.real[lane] + 1j * x.imag[lane], aval.dtype)
    return np.asarray(x[lane], None if _is_key(aval.dtype) else aval.dtype)


_ON_KEYS: dict[str, Callable[..., Value]] = {
    "random_wrap": lambda run, eqn, x: _of_words(x),
    "random_unwrap": lambda run, eqn, x: _words(x),
}


# --- collectives


def _all_gather(params: Any, n: np.ndarray) -> np.ndarray:
    dim, members = params["all_gather_dimension"], n.shape[1]
    whole = np.moveaxis(n, 1, 1 + dim)
    if params["tiled"]:
        whole = whole.reshape(len(n), *(k * (members if d == dim else 1) for d, k in enumerate(n.shape[2:])))
    return np.repeat(whole[:, None], members, 1)


def _chunks(n: np.ndarray, dim: int) -> np.ndarray:
    """``[groups, members, chunk, ...]``: as many chunks of a dimension as members."""
    parts = n.reshape(*n.shape[: 2 + dim], n.shape[1], n.shape[2 + dim] // n.shape[1], *n.shape[3 + dim :])
    return np.moveaxis(parts, 2 + dim, 2)


def _scatter(params: Any, n: np.ndarray) -> np.ndarray:
    dim, own = params["scatter_dimension"], np.arange(n.shape[1])
    found = _chunks(n, dim)[:, own, own]
    return found if params["tiled"] else found.squeeze(2 + dim)


def _all_to_all(params: Any, n: np.ndarray) -> np.ndarray:
    received = _chunks(n, params["split_axis"]).swapaxes(1, 2)
    shape = list(received.shape[3:])
    shape[params["concat_axis"]] *= n.shape[1]
    return np.moveaxis(received, 2, 2 + params["concat_axis"]).reshape(*n.shape[:2], *shape)


def _permute(params: Any, n: np.ndarray) -> np.ndarray:
    sources, targets = ([int(pair[end]) for pair in params["perm"]] for end in (0, 1))
    if len({*sources}) < len(sources) or len({*targets}) < len(targets):
        raise Undecided("'ppermute' has a source or a destination twice.")
    found = np.zeros_like(n)
    found[:, targets] = n[:, sources]
    return found


def _ragged(params: Any, n: np.ndarray, old: np.ndarray, starts: Any, sizes: Any, targets: Any, _: Any) -> np.ndarray:
    """Rows from ``input_offsets`` on are written to ``output_offsets`` in the outputs of the receivers."""
    chunks = starts.shape[2] // n.shape[1]
    for group, sender, i in np.ndindex(starts.shape):
        first, count, to = (int(x[group, sender, i]) for x in (starts, sizes, targets))
        old[group, i // chunks, to : to + count] = n[group, sender, first : first + count]
    return old


# Functions of the numbers of elements, ``[groups, members, ...]``, that move these; 0 is the number of what is 0.
_MOVES: dict[str, Callable[..., np.ndarray]] = {
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), _all_gather),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), _scatter),
    "all_to_all": _all_to_all,
    "ppermute": _permute,
    "pbroadcast": lambda params, n: n[:, [params["source"]] * n.shape[1]],
    "ragged_all_to_all": _ragged,
}
_REDUCES = {
    **dict.fromkeys("psum psum2 psum_invariant reduce_scatter unreduced_reduce_scatter".split(), "sum"),
    "pmax": "max",
    "pmin": "min",
}


def _groups(axes: Axes, named: Sequence[Any], parts: Any) -> np.ndarray:
    """The devices of each group, ``[groups, members]``; ``parts`` are ``axis_index_groups``."""
    names, sizes = zip(*axes, strict=True)
    at = [names.index(a) for a in named]
    devices = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), at, range(-len(at), 0))
    groups = devices.reshape(-1, math.prod(sizes[i] for i in at))
    if parts and len(set(map(len, parts))) > 1:
        raise Undecided("the groups of a collective differ in size.")
    return groups[:, np.array(parts)].reshape(-1, len(parts[0])) if parts else groups


def _named(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """The axes of a collective."""
    named = params.get("axis_name", params.get("axes", ()))
    return tuple(named) if isinstance(named, (tuple, list)) else (named,)


def _collective(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    name, params = eqn.primitive.name, eqn.params
    named = _named(params)
    how = _REDUCES.get(name)
    of_each = [Operation("", {}, (), (), (), (v.aval.dtype,), run.domain, run.lanes) for v in eqn.outvars]
    if dims := [a + 1 for a in named if isinstance(a, int)]:  # vmap has replaced an axis by a dimension
        if how is None or name in _MOVES:
            raise Undecided(f"'{name}' over a dimension of an array has no exact value.")
        operands = [as_reduced(o, x, dims, how) for o, x in zip(of_each, operands, strict=True)]
        named = tuple(a for a in named if not isinstance(a, int))
    if not named:
        return list(operands)
    groups = _groups(run.axes, named, params.get("axis_index_groups"))
    if name == "ppermute" and (groups != np.sort(groups)).any():  # versions of JAX number the devices differently
        raise Undecided("'ppermute' names its axes in another order than the mesh.")
    if name == "axis_index":
        index = np.empty(groups.size, np.int32)
        index[groups] = np.arange(groups.shape[1])
        return [np.tile(index, run.domain.draws)]
    operands = [moved(functools.partial(_full_lanes, lanes=run.lanes), x) for x in operands]
    if how is not None:
        operands = [_reduced(o, x, groups, how) for o, x in zip(of_each, operands, strict=True)]
    if name not in _MOVES:
        return list(operands)
    move = functools.partial(_MOVES[name], params)
    if name == "ragged_all_to_all":
        return [_sent(run, move, groups, operands[:2], operands[2:])]
    return [_sent(run, move, groups, [x], ()) for x in operands]


def _reduced(o: Operation, x: Value, groups: np.ndarray, how: str) -> Value:
    """The combination of the arrays of a group, on each of its devices."""
    back, draws = np.argsort(groups.ravel()), o.domain.draws
    members = moved(lambda v: v.reshape(draws, groups.size, *v.shape[1:])[:, groups], x)
    total = as_reduced(dataclasses.replace(o, lanes=draws), members, [2], how)
    return moved(lambda v: np.repeat(v, groups.shape[1], 1)[:, back].reshape(-1, *v.shape[2:]), total)


def _sent(
    run: Interpreter, move: Any, groups: np.ndarray, arrays: Sequence[Value], places: Sequence[np.ndarray]
) -> Value:
    """The arrays of all devices after their elements are moved."""
    draws, devices, count = run.domain.draws, groups.size, 1
    numbers = []
    for x in arrays:
        size = devices * math.prod(x.shape[1:])
        numbers.append(np.arange(count, count + size).reshape(devices, *x.shape[1:])[groups])
        count += size
    by_draw = [x.reshape(draws, devices, *x.shape[1:])[:, groups] for x in places]
    at = np.stack([move(*numbers, *(x[draw] for x in by_draw)) for draw in range(draws if places else 1)])
    at = at.reshape(len(at), devices, *at.shape[3:])[:, np.argsort(groups.ravel())]
    lanes, first = np.arange(draws).reshape(-1, *(1,) * (at.ndim - 1)), arrays[0]
    if (at == 0).any():
        arrays = [np.zeros((1,) * first.ndim, first.dtype if isinstance(first, np.ndarray) else np.int64), *arrays]
    else:
        at = at - 1

    def send(*vs: np.ndarray) -> np.ndarray:
        rows = [np.broadcast_to(v.ravel(), (draws, 1)) if v.size == 1 else v.reshape(draws, -1) for v in vs]
        return np.concatenate(rows, 1)[lanes, at].reshape(draws * devices, *at.shape[2:])

    return moved(send, *arrays)
