"""Elementwise primitives: each dimension of the result is a parallel factor that all operands share.

Operands may be scalars, or have dimensions of size 1 that are broadcast and have no factor.

    f32[8,6] + f32[8,6]      a b, a b -> a b
    f32[8,6] * f32[1,6]      a b, 1 b -> a b
    max(f32[8,6], 0.0)       a b, () -> a b
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.comm.steps import has_infinities
from gshard.core.memory_kinds import space
from gshard.core.rule import Rule, RuleMaker, Way, moves
from gshard.language.registry import Call, rule
from gshard.language.traits import Ways, added, combined, if_finite, is_exact, set_traits, sums_in_range
from gshard.language.transfer import transferred

# What rounds nothing, or once as IEEE 754 defines it: every compiler gives the same bits.
EXACT = """
abs add add_any and ceil clamp clz complex conj convert_element_type copy copy_p eq eq_to floor ge gt imag is_finite le
le_to lt lt_to max min mul name ne neg not or population_count real reduce_precision round select_n shift_left
shift_right_arithmetic shift_right_logical sign stop_gradient sub threefry2x32 xor
""".split()
OTHERS = """
acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1
igamma igamma_grad_a igammac integer_pow lgamma log log1p log2 logistic nextafter one_minus_square polygamma
polynomial pow random_gamma_grad regularized_incomplete_beta rem rsqrt sin sinh sqrt square tan tanh zeta
""".split()


@rule(*EXACT, *OTHERS, elementwise=True)
def elementwise(call: Call) -> Rule:
    """Each dimension is one factor, which all operands and results share.

    >>> print(elementwise(Call("mul", {}, ((8, 6), (1, 6)), ((8, 6),), ("f", "f"))))
    a b, 1 b -> a b
    """
    make = RuleMaker()
    shape = call.out_shapes[0]
    dims = make.parallel(shape)

    def operand(operand_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        if not operand_shape:
            return []
        return [dim if n == m else () for dim, n, m in zip(dims, operand_shape, shape, strict=True)]

    operands = [operand(s) for s in call.in_shapes]
    results, rounded = [dims for _ in call.out_shapes], _rounded(call)
    return make.rule(operands, results, linear=_linear(call), finite=_finite(call), rounded=rounded)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The quotient, if all divisors are powers of two: some devices multiply by the inverse."""
    are_floats = "f" in (x.dtype.kind, y.dtype.kind)
    exact = are_floats and all(np.frexp(n)[0] in (0.5, -0.5) for n in np.unique(y))
    return np.divide(x, y) if exact else None


def _select(index: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    index = np.clip(np.broadcast_to(index, cases[0].shape).astype(np.int64), 0, len(cases) - 1)
    return np.take_along_axis(np.stack(cases), index[None], 0)[0]


_VALUES: dict[str, Callable[..., np.ndarray | None]] = {
    "convert_element_type": lambda x: x, "select_n": _select, "floor": np.floor, "ceil": np.ceil, "div": _divide,
    "neg": np.negative, "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
    "rem": lambda x, y: np.fmod(x, y) if y.all() else None,
    "max": np.maximum, "min": np.minimum, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
for _name, _f in _VALUES.items():
    set_traits(_name, values=lambda params, *arrays, _f=_f: _f(*arrays))
for _name, _monoid in {"add_any": "add", **{_m: _m for _m in ("add", "mul", "max", "min", "and", "or", "xor")}}.items():
    set_traits(_name, monoid=_monoid)
set_traits("copy_p", "name", remark=True)
set_traits("copy", "copy_p", "name", "stop_gradient", handed_on=True)


_COPIES = ("copy", "copy_p", "name", "stop_gradient")
# Operations that are linear in these operands together.
_ADDITIVE = {"add": (0, 1), "add_any": (0, 1), "sub": (0, 1), "complex": (0, 1), "real": (0,), "imag": (0,)}
_COMBINES = ("max", "min", "and", "or", "xor")


def _linear(call: Call) -> Ways:
    """The value of ``linear``: the ways in which unreduced operands pass."""
    name, dtypes = call.name, call.in_dtypes
    if name == "select_n":
        return moves(*range(1, len(dtypes)))
    if name in _COPIES:
        return moves(0)
    if name in _ADDITIVE:
        return [*added(dtypes[0], *_ADDITIVE[name]), *([("pick", (0,))] if len(dtypes) == 1 else [])]
    if name in _COMBINES:
        return combined(name, dtypes[0], 0, 1)
    if name == "neg":
        return [*added(dtypes[0], 0), ("pick", (0,))] if is_exact(dtypes[0]) else []
    if name in ("mul", "div"):
        return _scaling(call)
    if name == "convert_element_type":
        return _conversion(dtypes[0], call.params["new_dtype"])
    return []


def _finite(call: Call) -> Ways:
    """The value of ``finite``: the ways in which finite parts of sums of floats pass and stay finite."""
    name, dtype = call.name, call.in_dtypes[0] if call.in_dtypes else None
    if name in _ADDITIVE:
        return if_finite(dtype, _ADDITIVE[name])
    if name in ("neg", "conj"):
        return if_finite(dtype, (0,))
    if name == "mul":
        arrays = [(i, call.literal(1 - i)) for i in (0, 1) if call.literal(i) is None]
        return if_finite(dtype, *((i,) for i, scale in arrays if scale is None or math.isfinite(scale)))
    if name == "div":
        return [] if call.literal(1) == 0 else if_finite(dtype, (0,))
    if name == "convert_element_type":
        return if_finite(dtype, (0,)) if _represents_all(dtype, call.params["new_dtype"]) else []
    return []


def _rounded(call: Call) -> tuple[Way, ...]:
    """The value of ``rounded``: a conversion to fewer digits of the same range, such as float32 to bfloat16."""
    if call.name != "convert_element_type":
        return ()
    dtypes = call.in_dtypes[0], call.params["new_dtype"]
    if not all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in dtypes):
        return ()
    old, new = map(jnp.finfo, dtypes)
    has_range = new.nmant < old.nmant and new.maxexp >= old.maxexp and new.minexp <= old.minexp
    return (("add", frozenset((0,))),) if has_range else ()


def _represents_all(before: Any, after: Any) -> bool:
    """Whether a dtype of floats (``after``) contains every number of another one (``before``)."""
    if not all(jax.dtypes.issubdtype(dtype, np.inexact) for dtype in (before, after)):
        return False
    if jax.dtypes.issubdtype(after, np.floating) and jax.dtypes.issubdtype(before, np.complexfloating):
        return False
    old, new = jnp.finfo(before), jnp.finfo(after)
    return new.nmant >= old.nmant and new.maxexp >= old.maxexp and new.minexp <= old.minexp


def _scaling(call: Call) -> Ways:
    """The ways of products and quotients: integers pass products, and floats pass those with the number 1.

    Parts of a sum of floats do not pass others: 1/8 of 2e-38 is zero on most devices, but the sum of eight such parts
    is not.
    """
    dtype, is_product = call.in_dtypes[0], call.name == "mul"
    if is_exact(dtype):
        return [("add", (0,)), ("add", (1,)), ("mul", (0, 1))] if is_product else []
    if not jax.dtypes.issubdtype(dtype, np.floating) or not sums_in_range(dtype):
        return []
    return [("add", (i,)) for i in (0, 1) if call.literal(1 - i) == 1 and (i == 0 or is_product)]


def _conversion(before: Any, after: Any) -> Ways:
    """The ways of a conversion. Rounding keeps the order, so extremes pass. Sums pass if nothing is rounded.

    Sums may only pass to a wider dtype with the same largest number, such as bfloat16 to float32. In float64 an
    infinite sum of float32 would be finite. Extremes do not pass to floats without infinities: the identity of their
    monoid would become NaN.
    """
    if before == after:
        return moves(0)
    picked: Ways = [("pick", (0,))]
    if not all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in (before, after)):
        return picked
    old, new = jnp.finfo(before), jnp.finfo(after)
    extremes: Ways = [("max", (0,)), ("min", (0,))] if has_infinities(after) else []
    sums = added(before, 0) if new.bits > old.bits and new.maxexp == old.maxexp else []
    return [*picked, *extremes, *sums]


def _unchanged(call: Call, **attributes: Any) -> Rule:
    """The rule of operators that return their operands, each with its own parallel dimensions."""
    make = RuleMaker()
    arrays = [make.parallel(shape) for shape in call.in_shapes]
    return make.rule(arrays, arrays[: len(call.out_shapes)], **attributes)


@rule("gshard_mark", "sharding_constraint", "reshard")
def mark(call: Call) -> Rule:
    """A mark returns its operand, with the sharding that the user wants."""
    return _unchanged(call, local=lambda shards, x: [x], flops=0)


@rule("xla_metadata_value")
def annotated(call: Call) -> Rule:
    """Each device annotates the operation that computes its part."""
    return _unchanged(call, linear=moves(0), flops=0)


@rule("layout_constraint")
def layout_constraint(call: Call) -> Rule:
    """Each part has the same order of dimensions in memory.

    >>> print(layout_constraint(Call("layout_constraint", {}, ((4, 6),), ((4, 6),), ("f4",))))
    a b -> a b
    """
    return _unchanged(call, linear=moves(0), passes=True)


@rule("device_put", shared=False)
def device_put(call: Call) -> Rule:
    """A transfer to another memory (``language.transfer``): each device moves its own part."""
    to_host = call.params["devices"] == (space(True),)
    return _unchanged(call, local=lambda shards, x: [transferred(x, to_host)], flops=0)


@rule("optimization_barrier", shared=False, handed_on=True)
def optimization_barrier(call: Call) -> Rule:
    """A barrier returns its operands."""
    return _unchanged(call, passes=True)
