"""Elementwise primitives: every dimension of the result is a parallel factor that all operands share.

Operands may be scalars, or have dimensions of size 1 where the result is larger: such a dimension is broadcast
and has no factor.

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
from gshard.core.rule import Rule, RuleMaker, moves
from gshard.language.passing import Ways, added, combined, if_finite, is_exact, sums_in_range
from gshard.language.registry import Call, rule
from gshard.language.traits import set_traits
from gshard.language.transfer import transferred

UNARY = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj convert_element_type copy copy_p cos cosh
digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p log2 logistic name neg not
one_minus_square polynomial population_count real reduce_precision round rsqrt sign sin sinh sqrt square stop_gradient
tan tanh
""".split()

N_ARY = """
add add_any and atan2 clamp complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min mul ne
nextafter or polygamma pow random_gamma_grad regularized_incomplete_beta rem select_n shift_left shift_right_arithmetic
shift_right_logical sub threefry2x32 xor zeta
""".split()


@rule(*UNARY, *N_ARY, elementwise=True)
def elementwise(call: Call) -> Rule:
    """One factor a dimension, shared by all operands and results.

    >>> print(elementwise(Call("mul", {}, ((8, 6), (1, 6)), ((8, 6),), ("f", "f"))))
    a b, 1 b -> a b
    """
    make = RuleMaker()
    shape = call.out_shapes[0]
    dims = make.parallel(shape)

    def operand(own: tuple[int, ...]) -> list[tuple[int, ...]]:
        if not own:
            return []
        return [dim if n == m else () for dim, n, m in zip(dims, own, shape, strict=True)]

    operands = [operand(s) for s in call.in_shapes]
    slow = [i for i in _SLOW_IN.get(call.name, (0,) if call.name in _SLOW else ()) if call.literal(i) is None]
    return make.rule(operands, [dims for _ in call.out_shapes], linear=_linear(call), finite=_finite(call), slow=slow)


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    floats = "f" in (x.dtype.kind, y.dtype.kind)
    exact = floats and all(np.frexp(n)[0] in (0.5, -0.5) for n in np.unique(y))
    return np.divide(x, y) if exact else None  # some devices multiply by the inverse


def _selected(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    at = np.clip(np.broadcast_to(which, cases[0].shape).astype(np.int64), 0, len(cases) - 1)
    return np.take_along_axis(np.stack(cases), at[None], 0)[0]


_VALUES: dict[str, Callable[..., np.ndarray | None]] = {
    "convert_element_type": lambda x: x, "select_n": _selected, "floor": np.floor, "ceil": np.ceil, "div": _divided,
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
set_traits("convert_element_type", free=True)


# What XLA calls expensive: roots, transcendental functions, and divisions but for those by a number.
_SLOW = frozenset(
    """
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma
    log log1p log2 logistic rsqrt sin sinh sqrt tan tanh
    """.split()
)
_SLOW_IN = {"div": (1,), "rem": (1,), "pow": (0, 1), "atan2": (0, 1)}


_MOVES = ("copy", "copy_p", "name", "stop_gradient")
_ADDING = {"add": (0, 1), "add_any": (0, 1), "sub": (0, 1), "complex": (0, 1), "real": (0,), "imag": (0,)}
_KEEPING_ZERO = ("abs", "ceil", "floor", "round", "sign", "sqrt", "square")  # 0.0 becomes 0.0, and no -0.0
_COMBINING = ("max", "min", "and", "or", "xor")


def _linear(call: Call) -> Ways:
    """The ways in which unreduced operands pass."""
    name, dtypes = call.name, call.in_dtypes
    if name == "select_n":
        return moves(*range(1, len(dtypes)))
    if name in _MOVES:
        return moves(0)
    if name in _ADDING:
        return [*added(dtypes[0], *_ADDING[name]), *([("pick", (0,))] if len(dtypes) == 1 else [])]
    if name in _COMBINING:
        return [*combined(name, dtypes[0], 0, 1), *_bounded(call)]
    if name in _KEEPING_ZERO or (name == "integer_pow" and call.params["y"] > 0):
        return [("pick", (0,))]
    if name == "neg":
        return [*added(dtypes[0], 0), ("pick", (0,))] if is_exact(dtypes[0]) else []
    if name in ("mul", "div"):
        return _scaling(call)
    if name == "convert_element_type":
        return _conversion(dtypes[0], call.params["new_dtype"])
    return []


def _finite(call: Call) -> Ways:
    """The ways in which parts of sums of floats pass that are finite, and stay so."""
    name, dtype = call.name, call.in_dtypes[0] if call.in_dtypes else None
    if name in _ADDING:
        return if_finite(dtype, _ADDING[name])
    if name in ("neg", "conj"):
        return if_finite(dtype, (0,))
    if name == "mul":
        by = [(i, call.literal(1 - i)) for i in (0, 1) if call.literal(i) is None]
        return if_finite(dtype, *((i,) for i, c in by if c is None or math.isfinite(c)))
    if name == "div":
        return [] if call.literal(1) == 0 else if_finite(dtype, (0,))
    if name == "convert_element_type":
        return if_finite(dtype, (0,)) if _holds_all(dtype, call.params["new_dtype"]) else []
    return []


def _holds_all(before: Any, after: Any) -> bool:
    """Whether a type of floats has every number of another one."""
    if not all(jax.dtypes.issubdtype(dtype, np.inexact) for dtype in (before, after)):
        return False
    real = jax.dtypes.issubdtype(after, np.floating) and jax.dtypes.issubdtype(before, np.complexfloating)
    a, b = jnp.finfo(before), jnp.finfo(after)
    return not real and b.nmant >= a.nmant and b.maxexp >= a.maxexp and b.minexp <= a.minexp


def _bounded(call: Call) -> Ways:
    """Operators that leave zero unchanged: ``max`` with a number not above zero, ``min`` with one not below."""
    if call.name not in ("max", "min"):
        return []

    def keeps_zero(c: float | None) -> bool:
        if c is None or c == 0:  # of 0.0 and -0.0 either one may be taken
            return c is not None and math.copysign(1, c) > 0
        return c < 0 if call.name == "max" else c > 0

    return [("pick", (i,)) for i in (0, 1) if keeps_zero(call.literal(1 - i))]


def _scaling(call: Call) -> Ways:
    """A product of integers; of floats what was looked up, by a number of the program that makes no zero a NaN.

    Parts of a sum of floats do not pass: 1/8 of 2e-38 is zero on most devices, eight eighths of it are not.
    """
    dtype, multiplies = call.in_dtypes[0], call.name == "mul"
    if is_exact(dtype):
        return [("add", (0,)), ("add", (1,)), ("mul", (0, 1))] if multiplies else []
    if not jax.dtypes.issubdtype(dtype, np.floating) or not sums_in_range(dtype):
        return []
    numbers = [call.literal(1), call.literal(0) if multiplies else None]
    scales = [c if multiplies or not c else 1 / c for c in numbers]
    picked = [("pick", (i,)) for i, c in enumerate(scales) if c is not None and 0 < c < math.inf]
    return [*(("add", (i,)) for i, c in enumerate(scales) if c == 1), *picked]


def _conversion(before: Any, after: Any) -> Ways:
    """Rounding keeps the order of numbers, so extremes pass; sums pass where nothing is rounded away.

    A sum that is infinite must not be finite because its parts were added in a wider type: bfloat16 may become float32,
    which ends where it does, but not float64. Floats without infinities make NaN of those that parts of extremes hold.
    """
    if before == after:
        return moves(0)
    picked: Ways = [("pick", (0,))]
    if not all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in (before, after)):
        return picked
    wider = jnp.finfo(after).bits > jnp.finfo(before).bits and jnp.finfo(after).maxexp == jnp.finfo(before).maxexp
    extremes: Ways = [("max", (0,)), ("min", (0,))] if has_infinities(after) else []
    return [*picked, *extremes, *(added(before, 0) if wider else [])]


@rule("gshard_mark", "sharding_constraint", "reshard")
def mark(call: Call) -> Rule:
    """A mark changes nothing: its result is its operand, sharded as the user wants it."""
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    return make.rule([dims], [dims], local=lambda shards, x: [x], flops=0)


@rule("xla_metadata_value")
def annotated(call: Call) -> Rule:
    """The annotation goes to the operation that made the array on each device."""
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    return make.rule([dims], [dims], linear=moves(0), flops=0)


@rule("device_put", shared=False)
def device_put(call: Call) -> Rule:
    """A transfer to another memory (``language.transfer``): each device moves its own part."""
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    to_host = call.params["devices"] == (space(True),)
    return make.rule([dims], [dims], local=lambda shards, x: [transferred(x, to_host)], flops=0)


@rule("optimization_barrier", shared=False, fixed=True, handed_on=True)
def each_by_itself(call: Call) -> Rule:
    """Operands that pass through side by side: each has its own factors."""
    make = RuleMaker()
    tensors = [make.parallel(shape) for shape in call.in_shapes]
    return make.rule(tensors, tensors, passes=True)
