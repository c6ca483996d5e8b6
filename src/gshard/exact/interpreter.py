"""Runs jaxprs on arrays of lanes: regions, calls, and ``shard_map`` with its collectives, for all devices together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.core.planning_tables import tabulated
from gshard.core.rule import PARALLEL
from gshard.exact.combining import as_reduced, elements_along, windows
from gshard.exact.movement import padded
from gshard.exact.numbers import Field, Reals, Value
from gshard.exact.operations import (
    COMBINE,
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
        if (name in _COLLECTIVES or name in ("axis_index", "ragged_all_to_all")) and not jax_adapter.sub_jaxprs(
            eqn.params
        ):
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
        if (opened := _opened(eqn, self._operation(eqn), self.trusts_rules)) is not None:
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

    def _has_shapes(self, eqn: Any) -> bool:
        variables = [v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, core.Literal)]
        return all(self.sizes.shape(v) == tuple(v.aval.shape) for v in variables)

    def by_jax(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of an equation, which JAX runs once for each different lane."""
        avals, results = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        if not self._has_shapes(eqn) and not any(_is_key(a.dtype) for a in (*avals, *results)):
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

        def order(dims: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
            rows = {dim[0]: d for d, dim in enumerate(dims) if len(dim) == 1 and dim[0] in parallel}
            if set(rows) != set(parallel):
                raise Undecided(f"'{name}' cannot be run exactly.")
            return [rows[f] for f in parallel], [d for d in range(len(dims)) if d not in rows.values()]

        def flat(v: np.ndarray, dims: Sequence[tuple[int, ...]]) -> np.ndarray:
            rows, others = order(dims)
            count = math.prod(v.shape[d + 1] for d in rows)
            rest = math.prod(v.shape[d + 1] for d in others)
            return v.transpose(0, *(d + 1 for d in (*rows, *others))).reshape(len(v), count, rest)

        if any(isinstance(x, Complex) for x in operands):
            raise Undecided(f"'{name}' of complex numbers has no exact value.")
        rows = [moved(functools.partial(flat, dims=d), x) for x, d in zip(operands, rule.operands, strict=True)]
        wanted = []
        for shape, dtype, dims in zip(o.shapes, o.dtypes, rule.results, strict=True):
            wanted.append(([shape[d] for d in order(dims)[1]], dtype))
        sizes = [rule.factors[f].size for f in parallel]
        results = []
        for x, dims in zip(self.domain.of_arrays(_text(name, eqn.params), wanted, rows), rule.results, strict=True):
            of_rows, others = order(dims)
            back = np.argsort([*of_rows, *others])
            rest = x.shape[2:]
            results.append(
                moved(lambda v, r=rest, b=back: v.reshape(len(v), *sizes, *r).transpose(0, *(d + 1 for d in b)), x)
            )
        return results


def _text(name: str, params: dict[str, Any]) -> str:
    """A name of an operator with its parameters."""
    return f"{name} {[(k, str(v)) for k, v in sorted(params.items()) if k not in ('sharding', 'out_sharding', 'vma')]}"


def _opened(eqn: Any, o: Operation, opens_kernels: bool) -> Any:
    """The jaxpr of an operator that a Python function of JAX operators defines; None for others."""
    if o.name == "gshard_kernel" and opens_kernels:
        o.domain.identities.add("kernels compute what their plain functions do")
        return eqn.params["kernel"].plain_jaxpr(tuple(zip(o.in_shapes, o.in_dtypes, strict=True)))
    if o.name == "custom_partitioning" and o.in_shapes == tuple(x.shape for x in eqn.params["call"].in_avals):
        return eqn.params["call"]
    function = IN_BLOCKS.get(o.name) or jax_adapter.function_of(eqn.primitive)
    if function is None:
        return None
    avals = [jax.ShapeDtypeStruct(*x) for x in zip(o.in_shapes, o.in_dtypes, strict=True)]
    try:
        opened = jax.make_jaxpr(functools.partial(function, **eqn.params))(*avals)
    except Exception:  # it needs more than shapes, or these shapes
        return None
    inside = {e.primitive.name for e in jax_adapter.closed(opened)[0].eqns}
    made = tuple(tuple(v.aval.shape) for v in jax_adapter.closed(opened)[0].outvars)
    return None if o.name in inside or made != o.shapes else opened


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
    """Refuses loops and branches with collectives that not all devices run together: they would wait forever."""
    by_draw = chosen.reshape(run.domain.draws, -1)
    if (by_draw != by_draw[:, :1]).any() and any(map(_communicates, bodies)):
        raise Undecided(
            "devices leave a loop or take a branch apart, and there is a collective inside: they would wait."
        )


@tabulated(1024)
def _communicates(jaxpr: Any) -> bool:
    eqns = jax_adapter.closed(jaxpr)[0].eqns
    return any(
        e.primitive.name in (*_COLLECTIVES, "ragged_all_to_all")
        or any(map(_communicates, jax_adapter.sub_jaxprs(e.params)))
        for e in eqns
    )


def _where(condition: np.ndarray, new: Value, old: Value) -> Value:
    if condition.all():
        return new
    shape = (*condition.shape, *(1,) * (new.ndim - condition.ndim))
    return moved(lambda a, b: np.where(condition.reshape(shape), a, b), new, old)


def _reduce(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """A reduction by a function: the elements are combined one after the other."""
    count = len(operands) // 2
    axes = [d + 1 for d in eqn.params["dimensions"]]
    rows = list(zip(*(elements_along(x, axes) for x in operands[:count]), strict=True))
    return _folded(run, eqn.params["jaxpr"], rows, operands[count:], run.sizes.shape(eqn.outvars[0]))


def _reduce_window(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """A reduction of windows by a function. Elements of the padding are left out."""
    p, count, o = eqn.params, len(operands) // 2, run._operation(eqn)
    config = [(a, b, n - 1) for (a, b), n in zip(p["padding"], p["base_dilation"], strict=True)]
    own = p["window_dimensions"], p["window_strides"], p["window_dilation"]

    def inside(x: Value, fill: Value) -> list[Value]:
        return elements_along(windows(padded(o, x, config, fill), *own, o.shape, 1), range(2, 2 * x.ndim - 1, 2))

    rows = list(
        zip(*(inside(x, start) for x, start in zip(operands[:count], operands[count:], strict=True)), strict=True)
    )
    are_elements = inside(np.ones(operands[0].shape, bool), np.zeros(run.lanes, bool))  # what is padded does not count
    return _folded(run, p["jaxpr"], rows, operands[count:], o.shape, are_elements)


def _folded(
    run: Interpreter, jaxpr: Any, rows: Any, starts: Sequence[Value], shape: Sequence[int], counts: Any = ()
) -> list[Value]:
    """Combines rows of arrays one after the other; where ``counts`` is False an element does not count."""
    whole = (run.lanes, *shape)
    carry = [moved(lambda v: np.broadcast_to(v.reshape(-1, *(1,) * len(shape)), whole), x) for x in starts]
    for i, row in enumerate(rows):
        new = run.run(jaxpr, [*carry, *row])
        carry = [_where(counts[i], n, c) for n, c in zip(new, carry, strict=True)] if counts else new
    return carry


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
    manual = params.get("manual_axes") or frozenset(mesh.axis_names)
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
    sizes = dict(axes)
    shape, where = [len(v)], {}
    for d, n in enumerate(v.shape[1:]):
        names = [a for a in (spec[d] if d < len(spec) else ()) if a in sizes]
        for a in names:
            where[a] = len(shape)
            shape.append(sizes[a])
        shape.append(n // math.prod(sizes[a] for a in names))
    split = v.reshape(shape)
    front = [where[a] for a, _ in axes if a in where]
    rest = [d for d in range(1, len(shape)) if d not in front]
    split = split.transpose(0, *front, *rest)
    at = 1
    for a, n in axes:
        if a not in where:
            split = np.broadcast_to(np.expand_dims(split, at), (*split.shape[:at], n, *split.shape[at:]))
        at += 1
    return split.reshape(math.prod(split.shape[: 1 + len(axes)]), *split.shape[1 + len(axes) :])


def _joined(v: np.ndarray, axes: Axes, spec: Sequence[tuple[str, ...]], lanes: int) -> np.ndarray:
    """The inverse of ``cut``."""
    names = [a for a, _ in axes]
    split = v.reshape(lanes, *(n for _, n in axes), *v.shape[1:])
    for i in reversed(range(len(axes))):
        if not any(names[i] in dim for dim in spec):
            split = split.take(0, 1 + i)
    kept = [a for a in names if any(a in dim for dim in spec)]
    order, shape = [0], [lanes]
    for d in range(v.ndim - 1):
        dims = spec[d] if d < len(spec) else ()
        order += [*(1 + kept.index(a) for a in dims), 1 + len(kept) + d]
        shape.append(v.shape[d + 1] * math.prod(dict(axes)[a] for a in dims))
    return split.transpose(order).reshape(shape)


def _check_equal(run: Interpreter, eqn: Any, i: int, x: Value, lanes: int, axes: Axes, position: int) -> None:
    """All devices along an axis must have the same part of a replicated result."""
    parts = x if not isinstance(x, Complex) else x.real
    shape = (lanes, *(n for _, n in axes), *x.shape[1:])
    split = moved(lambda v: v.reshape(shape), parts)
    first = moved(lambda v: np.broadcast_to(v.take([0], 1 + position), shape), split)
    if run.domain.differs(split, first).any():
        run.unequal.append(Unequal(eqn, i, axes[position][0]))


_REGIONS: dict[str, Callable[[Interpreter, Any, Sequence[Value]], list[Value]]] = {
    "scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map, "reduce": _reduce,
    "reduce_window": _reduce_window,
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


def _groups(axes: Axes, named: Sequence[Any], parts: Any) -> np.ndarray:
    """The devices of each group, ``[groups, members]``; ``parts`` are ``axis_index_groups``."""
    names, sizes = zip(*axes, strict=True)
    at = [names.index(a) for a in named]
    devices = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), at, range(-len(at), 0))
    groups = devices.reshape(-1, math.prod(sizes[i] for i in at))
    if parts and len(set(map(len, parts))) > 1:
        raise Undecided("the groups of a collective differ in size.")
    return groups[:, np.array(parts)].reshape(-1, len(parts[0])) if parts else groups


def _collective(run: Interpreter, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    name, params = eqn.primitive.name, eqn.params
    named = params.get("axis_name", params.get("axes", ()))
    named = tuple(named) if isinstance(named, (tuple, list)) else (named,)
    if dims := [a + 1 for a in named if isinstance(a, int)]:  # vmap has replaced an axis by a dimension
        if name not in ("psum", "pmax", "pmin"):
            raise Undecided(f"'{name}' over a dimension of an array has no exact value.")
        operands = [as_reduced(run._operation(eqn), x, dims, name[1:]) for x in operands]
        named = tuple(a for a in named if not isinstance(a, int))
        eqn = SimpleNamespace(primitive=eqn.primitive, params={**params, "axes": named}, outvars=eqn.outvars)
    if not named:
        return list(operands)
    groups = _groups(run.axes, named, params.get("axis_index_groups"))
    if name == "ppermute" and (groups != np.sort(groups)).any():  # versions of JAX number the devices differently
        raise Undecided("'ppermute' names its axes in another order than the mesh.")
    if name == "axis_index":
        index = np.empty(groups.size, np.int32)
        index[groups] = np.arange(groups.shape[1])
        return [np.tile(index, run.domain.draws)]
    if name == "ragged_all_to_all":
        return [_ragged(run, groups, *operands)]
    return [_exchanged(run, eqn, groups, x) for x in operands]


def _exchanged(run: Interpreter, eqn: Any, groups: np.ndarray, x: Value) -> Value:
    """``[lanes, ...] -> [draws, groups, members, ...]``, the collective, and back."""
    name, draws = eqn.primitive.name, run.domain.draws
    devices = groups.size
    x = moved(functools.partial(_full_lanes, lanes=draws * devices), x)
    split = moved(lambda v: v.reshape(draws, devices, *v.shape[1:])[:, groups], x)
    found = _COLLECTIVES[name](run, eqn, split)
    back = np.argsort(groups.ravel())
    return moved(lambda v: v.reshape(draws, devices, *v.shape[3:])[:, back].reshape(-1, *v.shape[3:]), found)


def _reduced(how: str) -> Callable[..., Value]:
    def reduce(run: Interpreter, eqn: Any, x: Value) -> Value:
        o = Operation(how, {}, (), (), (), (), run.domain, run.lanes)
        members = [moved(lambda v, i=i: v[:, :, i], x) for i in range(x.shape[2])]
        total = functools.reduce(functools.partial(COMBINE[how], o), members)
        if how == "sum" and not is_float(total) and not isinstance(total, Complex):
            total = total.astype(eqn.outvars[0].aval.dtype)
        return moved(lambda v, n=x.shape[2]: np.broadcast_to(v[:, :, None], (*v.shape[:2], n, *v.shape[2:])), total)

    return reduce


def _all_gather(run: Interpreter, eqn: Any, x: Value) -> Value:
    dim, members = eqn.params["all_gather_dimension"], x.shape[2]

    def gather(v: np.ndarray) -> np.ndarray:
        whole = np.moveaxis(v, 2, 2 + dim)
        if eqn.params["tiled"]:
            shape = list(v.shape[3:])
            shape[dim] *= members
            whole = whole.reshape(*v.shape[:2], *shape)
        return np.broadcast_to(whole[:, :, None], (*v.shape[:2], members, *whole.shape[2:]))

    return moved(gather, x)


def _reduce_scatter(run: Interpreter, eqn: Any, x: Value) -> Value:
    dim, members = eqn.params["scatter_dimension"], x.shape[2]
    total = moved(lambda v: v[:, :, 0], _reduced("sum")(run, eqn, x))

    def scatter(v: np.ndarray) -> np.ndarray:
        shape = v.shape[2:]
        split = v.reshape(*v.shape[:2], *shape[:dim], members, shape[dim] // members, *shape[dim + 1 :])
        parts = np.moveaxis(split, 2 + dim, 2)
        return parts if eqn.params["tiled"] else parts.squeeze(3 + dim)

    return moved(scatter, total)


def _all_to_all(run: Interpreter, eqn: Any, x: Value) -> Value:
    split_axis, concat_axis, members = eqn.params["split_axis"], eqn.params["concat_axis"], x.shape[2]

    def exchange(v: np.ndarray) -> np.ndarray:
        shape = v.shape[3:]
        parts = v.reshape(
            *v.shape[:3], *shape[:split_axis], members, shape[split_axis] // members, *shape[split_axis + 1 :]
        )
        received = np.moveaxis(np.moveaxis(parts, 3 + split_axis, 2), 3, 3 + concat_axis)
        local = list(shape)
        local[split_axis] //= members
        local[concat_axis] *= members
        return received.reshape(*v.shape[:3], *local)

    return moved(exchange, x)


def _ppermute(run: Interpreter, eqn: Any, x: Value) -> Value:
    pairs = [(int(s), int(t)) for s, t in eqn.params["perm"]]
    if any(len({*ends}) < len(pairs) for ends in zip(*pairs, strict=True)):
        raise Undecided("'ppermute' has a source or a destination twice.")
    source = np.zeros(x.shape[2], np.int64)
    receives = np.zeros(x.shape[2], bool)
    for s, t in pairs:
        source[t], receives[t] = s, True

    def permute(v: np.ndarray, zero: np.ndarray) -> np.ndarray:
        return np.where(receives.reshape(-1, *(1,) * (v.ndim - 3)), v[:, :, source], zero)

    dtype = eqn.outvars[0].aval.dtype
    if is_float(x) or isinstance(x, Complex):
        nothing = run.domain.constant(np.zeros((1,) * x.ndim), np.float32)
    else:
        nothing = np.zeros((1,) * x.ndim, np.int64 if _is_key(dtype) else dtype)
    return moved(permute, x, nothing)


def _broadcast(run: Interpreter, eqn: Any, x: Value) -> Value:
    source = eqn.params["source"]
    return moved(lambda v: np.broadcast_to(v[:, :, source : source + 1], v.shape), x)


def _ragged(run: Interpreter, groups: np.ndarray, x: Value, output: Value, *places: Value) -> Value:
    """Rows from ``input_offsets`` on are written to ``output_offsets`` in the outputs of the receivers."""
    starts, sizes, targets, _ = places
    draws, devices = run.domain.draws, groups.size
    rows = x.shape[1]
    read = np.full((draws * devices, output.shape[1]), -1)
    for draw in range(draws):
        for group in groups:
            for sender in group:
                lane = draw * devices + sender
                chunks = starts.shape[1] // len(group)
                for i in range(starts.shape[1]):
                    receiver = draw * devices + group[i // chunks]
                    first, n, to = int(starts[lane, i]), int(sizes[lane, i]), int(targets[lane, i])
                    read[receiver, to : to + n] = lane * rows + np.arange(first, first + n)
    arrives = (read >= 0).reshape(*read.shape, *(1,) * (x.ndim - 2))

    def write(v: np.ndarray, old: np.ndarray) -> np.ndarray:
        flat = v.reshape(-1, *v.shape[2:])
        return np.where(arrives, flat[np.maximum(read, 0)], old)

    return moved(write, x, output)


_COLLECTIVES: dict[str, Callable[..., Value]] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), _reduced("sum")),
    "pmax": _reduced("max"),
    "pmin": _reduced("min"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), _all_gather),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), _reduce_scatter),
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _broadcast,
}
