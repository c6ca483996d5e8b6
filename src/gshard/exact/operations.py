"""The operators of JAX on arrays of lanes: exact for integers, and in one of the domains of ``numbers`` for floats."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.errors import GShardError
from gshard.exact.numbers import Field, Reals, Residues, Value, moved_residues, residues_of


class Undecided(GShardError):
    """An operator that cannot be run exactly."""


@dataclasses.dataclass(frozen=True, slots=True)
class Complex:
    """An array of complex numbers."""

    real: Value  # the real parts
    imag: Value  # the imaginary parts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, lanes first."""
        return tuple(self.real.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions, lanes included."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One equation on smaller or equal shapes."""

    name: str  # the name of its primitive
    params: dict[str, Any]  # its parameters; shapes among them may be larger than those of the results
    in_shapes: tuple[tuple[int, ...], ...]  # without lanes
    shapes: tuple[tuple[int, ...], ...]  # of the results, without lanes
    in_dtypes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    domain: Field | Reals
    lanes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.shapes[0]

    @property
    def dtype(self) -> Any:
        """The dtype of the first result."""
        return self.dtypes[0]


Operator = Callable[..., Value]
OPERATORS: dict[str, Operator] = {}


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Registers ``function(operation, *operands) -> result, or results``."""

    def register(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def is_float(x: Value) -> bool:
    """Whether an array has floats."""
    return isinstance(x, Residues) or (isinstance(x, np.ndarray) and x.dtype.kind == "f")


def as_floats(o: Operation, x: Value) -> Value:
    """Floats as they are, integers as floats."""
    return x if is_float(x) else o.domain.from_ints(x)


def aligned(*operands: Value) -> list[Value]:
    """Arrays with equally many dimensions: scalars get some of size 1."""
    ndim = max(x.ndim for x in operands)
    return [x if x.ndim == ndim else reshaped(x, (*x.shape, *(1,) * (ndim - x.ndim))) for x in operands]


def moved(f: Callable[..., Any], *operands: Value) -> Value:
    """Applies a function that only moves elements, to arrays of one kind; integers become what others are."""
    if any(isinstance(x, Complex) for x in operands):
        parts = [x if isinstance(x, Complex) else Complex(x, zeros_like(x)) for x in operands]
        return Complex(moved(f, *(x.real for x in parts)), moved(f, *(x.imag for x in parts)))
    if any(isinstance(x, Residues) for x in operands):
        return moved_residues(f, *(x if isinstance(x, Residues) else residues_of(x) for x in operands))
    return f(*operands)


def reshaped(x: Value, shape: Sequence[int]) -> Value:
    """An array of another shape, lanes included."""
    return moved(lambda v: v.reshape(tuple(shape)), x)


def zeros_like(x: Value) -> Value:
    """Zeros of the shape of an array, as floats."""
    zero = np.zeros(x.shape)
    if not isinstance(x, Residues):
        return zero
    whole = zero.astype(np.int64)
    return Residues(whole, whole, real=zero, degree=0, is_positive=True)


def zeros(o: Operation, shape: Sequence[int], dtype: Any) -> Value:
    """Zeros on all lanes."""
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return Complex(zeros(o, shape, np.float32), zeros(o, shape, np.float32))
    if jax.dtypes.issubdtype(dtype, np.floating):
        return o.domain.constant(np.zeros((o.lanes, *shape)), np.float32)
    return np.zeros((o.lanes, *shape), dtype)


def _number(o: Operation, x: float, like: Value) -> Value:
    return o.domain.constant(np.full((o.lanes, *(1,) * (like.ndim - 1)), x), np.float64)


# --- elementwise


def add(o: Operation, a: Value, b: Value) -> Value:
    """a + b."""
    a, b = aligned(a, b)
    if isinstance(a, Complex) or isinstance(b, Complex):
        a, b = (x if isinstance(x, Complex) else Complex(x, zeros_like(x)) for x in (a, b))
        return Complex(add(o, a.real, b.real), add(o, a.imag, b.imag))
    if is_float(a) or is_float(b):
        return o.domain.add(as_floats(o, a), as_floats(o, b))
    with np.errstate(over="ignore"):
        return np.add(a, b) if a.dtype != bool else np.logical_or(a, b)


def neg(o: Operation, a: Value) -> Value:
    """-a."""
    if isinstance(a, Complex):
        return Complex(neg(o, a.real), neg(o, a.imag))
    with np.errstate(over="ignore"):
        return o.domain.neg(a) if is_float(a) else np.negative(a)


def mul(o: Operation, a: Value, b: Value) -> Value:
    """a b."""
    a, b = aligned(a, b)
    if isinstance(a, Complex) and isinstance(b, Complex):
        real = add(o, mul(o, a.real, b.real), neg(o, mul(o, a.imag, b.imag)))
        return Complex(real, add(o, mul(o, a.real, b.imag), mul(o, a.imag, b.real)))
    if isinstance(a, Complex) or isinstance(b, Complex):
        a, b = (a, b) if isinstance(a, Complex) else (b, a)
        return Complex(mul(o, a.real, b), mul(o, a.imag, b))
    if is_float(a) or is_float(b):
        return o.domain.mul(as_floats(o, a), as_floats(o, b))
    with np.errstate(over="ignore"):
        return np.multiply(a, b)


def _reciprocal(o: Operation, a: Value) -> Value:
    if not isinstance(a, Complex):
        return o.domain.reciprocal(a)
    size = o.domain.reciprocal(add(o, mul(o, a.real, a.real), mul(o, a.imag, a.imag)))
    return Complex(mul(o, a.real, size), neg(o, mul(o, a.imag, size)))


def _select(o: Operation, index: Value, *cases: Value) -> Value:
    index, *arrays = aligned(index, *cases)
    if len(arrays) == 2:
        return moved(lambda a, b: np.where(index, b, a), *arrays)
    which = np.clip(index, 0, len(arrays) - 1)
    return moved(lambda *xs: np.choose(which, np.broadcast_arrays(*xs)[: len(xs)]), *arrays)


def extreme(o: Operation, a: Value, b: Value, *, largest: bool) -> Value:
    """The maximum or minimum of two arrays."""
    a, b = aligned(a, b)
    if not is_float(a) and not is_float(b):
        return (np.maximum if largest else np.minimum)(a, b)
    a, b, d = as_floats(o, a), as_floats(o, b), o.domain
    left, right = d.pair(a, b)
    takes_left = left >= right if largest else left <= right
    d.note_outcomes(id(o.params), a, b, takes_left)
    takes_left = (takes_left & ~d.is_nan(b)) | d.is_nan(a)
    found = d.as_maximum(moved(lambda x, y: np.where(takes_left, x, y), a, b))
    if largest and isinstance(found, Residues) and (a.is_positive or b.is_positive):
        found = dataclasses.replace(found, is_positive=True)
    return found


def _compare(f: Callable[..., Any]) -> Operator:
    def compare(o: Operation, a: Value, b: Value) -> Value:
        a, b = aligned(a, b)
        if isinstance(a, Complex):
            return _all_equal(o, a, b) if f is np.equal else ~_all_equal(o, a, b)
        if not is_float(a) and not is_float(b):
            return f(a, b)
        a, b, d = as_floats(o, a), as_floats(o, b), o.domain
        nan = d.is_nan(a) | d.is_nan(b)
        if f in (np.equal, np.not_equal) and isinstance(d, Field):
            return np.where(nan, f is np.not_equal, d.differs(a, b) ^ (f is np.equal))
        found = np.where(nan, f is np.not_equal, f(*d.pair(a, b)))
        d.note_outcomes(id(o.params), a, b, found)
        return found

    return compare


def _all_equal(o: Operation, a: Complex, b: Complex) -> np.ndarray:
    equal = _compare(np.equal)
    return np.asarray(equal(o, a.real, b.real) & equal(o, a.imag, b.imag))


def _convert(o: Operation, x: Value) -> Value:
    d, old, new = o.domain, o.in_dtypes[0], o.dtype
    if isinstance(x, Complex):
        return x if jax.dtypes.issubdtype(new, np.complexfloating) else x.real
    if jax.dtypes.issubdtype(new, np.complexfloating):
        floats = as_floats(o, x)
        return Complex(floats, zeros_like(floats))
    if not jax.dtypes.issubdtype(new, np.floating):
        if not is_float(x):
            return x != 0 if new == np.bool_ else x.astype(new)
        if not jax.dtypes.issubdtype(old, np.floating):
            return x  # the bits of floats
        return OPERATORS["ne"](o, x, zeros(o, x.shape[1:], np.float32)) if new == np.bool_ else d.to_ints(x, new)
    if not is_float(x):
        return d.from_ints(x)
    if jax.dtypes.issubdtype(old, np.floating) and jax.numpy.finfo(new).bits < jax.numpy.finfo(old).bits:
        return d.narrowed(x, new)
    return x


def _bitcast(o: Operation, x: Value) -> Value:
    """The bits of floats are represented by the floats: bits that are added to zeros or compared stay what they are."""
    floats = [jax.dtypes.issubdtype(dtype, np.floating) for dtype in (o.in_dtypes[0], o.dtype)]
    if floats == [True, True] or floats == [False, False]:
        if is_float(x):
            return x
        found = np.ascontiguousarray(x).view(o.dtype)
        return found.reshape(o.lanes, *o.shape)
    if is_float(x):  # two floats of 16 bits in one integer keep their dimension
        if len(o.shape) >= x.ndim:
            raise Undecided("parts of the bits of floats have no exact value.")
        return x
    return o.domain.from_bits(np.ascontiguousarray(x).view(o.dtype).reshape(o.lanes, *o.shape))


def _bits_of(o: Operation, a: Value, b: Value) -> Value:
    """A bitwise operation on the bits of floats, of which one operand is zero or a mask of the order."""
    if is_float(a) and is_float(b):
        return o.domain.add(a, b)
    return a if is_float(a) else b


def _integers(f: Callable[..., Any], of_bits: Operator | None = None) -> Operator:
    def run(o: Operation, *operands: Value) -> Value:
        operands = tuple(aligned(*operands))
        if any(is_float(x) or isinstance(x, Complex) for x in operands):
            if of_bits is None:
                raise Undecided(f"'{o.name}' of the bits of floats has no exact value.")
            return of_bits(o, *operands)
        with np.errstate(all="ignore"):
            return np.asarray(f(*operands)).astype(o.dtype)

    return run


def _shift(f: Callable[..., Any], arithmetic: bool = False) -> Callable[..., Any]:
    def shift(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = x.dtype.itemsize * 8
        unsigned = x if arithmetic else x.view(f"u{x.dtype.itemsize}")
        by = by.astype(np.int64) % 2**32
        kept = f(unsigned, np.minimum(by, bits - 1).astype(unsigned.dtype))
        other = np.where(x < 0, -1, 0) if arithmetic else 0
        return np.where(by >= bits, other, kept).astype(unsigned.dtype).view(x.dtype)

    return shift


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    safe = np.where(y == 0, 1, y)
    found = np.sign(x) * np.sign(safe) * (abs(x) // abs(safe)) if x.dtype.kind == "i" else x // safe
    return np.where(y == 0, np.array(-1).astype(x.dtype), found)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _div(o: Operation, a: Value, b: Value) -> Value:
    if not any(is_float(x) or isinstance(x, Complex) for x in (a, b)):
        return _integers(_quotient)(o, a, b)
    return mul(o, a, _reciprocal(o, b if isinstance(b, Complex) else as_floats(o, b)))


def _rem(o: Operation, a: Value, b: Value) -> Value:
    if not is_float(a):
        return _integers(_remainder)(o, a, b)
    return _function(o, *aligned(a, b))


def _abs(o: Operation, a: Value) -> Value:
    if isinstance(a, Complex):
        return o.domain.sqrt(add(o, mul(o, a.real, a.real), mul(o, a.imag, a.imag)))
    return mul(o, a, o.domain.sign(a)) if is_float(a) else np.abs(a)


def _sign(o: Operation, a: Value) -> Value:
    if isinstance(a, Complex):
        return mul(o, a, _reciprocal(o, _abs(o, a)))
    return o.domain.sign(a) if is_float(a) else np.sign(a)


def _function(o: Operation, *operands: Value) -> Value:
    """A function of numbers: its values where they are known, else only that equal operands have equal results."""
    operands = tuple(aligned(*operands))
    if any(isinstance(x, Complex) for x in operands):
        raise Undecided(f"'{o.name}' of complex numbers has no exact value.")
    if not any(is_float(x) for x in operands):
        raise Undecided(f"'{o.name}' of integers is not implemented.")
    d = o.domain
    known = [d.decides(as_floats(o, x)) for x in operands]
    rounds = {"floor": np.floor, "ceil": np.ceil, "round": np.rint, "rem": np.fmod}.get(o.name)
    if rounds is not None and all(x is not None for x in known):
        return d.constant(np.asarray(rounds(*known)), np.float64)
    extra = {k: v for k, v in o.params.items() if k in ("y", "m", "n", "rounding_method") and v is not None}
    name = o.name if not extra or isinstance(d, Reals) else f"{o.name} {extra}"
    return d.function(name, *(as_floats(o, x) for x in operands))


def _power(o: Operation, a: Value, b: Value) -> Value:
    if not is_float(a) and not isinstance(a, Complex):
        return _integers(np.power)(o, a, b)
    exponents = None if isinstance(a, Complex) else o.domain.decides(as_floats(o, b))
    if exponents is not None and len(numbers := np.unique(exponents)) == 1:
        return _raised(o, a, float(numbers[0]))
    return _function(o, a, b)


def _raised(o: Operation, a: Value, exponent: float) -> Value:
    if 2 * exponent != int(2 * exponent) or abs(exponent) > 1024:
        return _function(o, a, _number(o, exponent, a))
    if exponent != int(exponent):
        a, exponent = o.domain.sqrt(a), 2 * exponent
    return o.domain.power(a, int(exponent))


def _integer_power(o: Operation, a: Value) -> Value:
    exponent = o.params["y"]
    if isinstance(a, Complex):
        base = a if exponent >= 0 else _reciprocal(o, a)
        one = Complex(_number(o, 1.0, a.real), _number(o, 0.0, a.real))
        return functools.reduce(functools.partial(mul, o), [base] * abs(exponent), one)
    return o.domain.power(a, exponent) if is_float(a) else np.power(a, exponent)


def _exp(o: Operation, a: Value, scale: float = 1.0) -> Value:
    if isinstance(a, Complex):
        raise Undecided("'exp' of complex numbers has no exact value.")
    return o.domain.exp(a if scale == 1.0 else mul(o, a, _number(o, scale, a)))


def _logistic(o: Operation, a: Value) -> Value:
    """1 / (1 + exp(-a))."""
    one = _number(o, 1.0, a)
    return o.domain.reciprocal(add(o, one, o.domain.exp(neg(o, a))))


def log_of_sum(o: Operation, a: Value, b: Value) -> Value:
    """log(exp(a) + exp(b))."""
    a, b = aligned(a, b)
    if isinstance(o.domain, Reals):
        return np.logaddexp(a, b)
    shift = extreme(o, a, b, largest=True)
    shift = moved(lambda v, w: np.where(o.domain.is_finite(shift), v, w), shift, _number(o, 0.0, shift))
    terms = (o.domain.exp(add(o, x, neg(o, shift))) for x in (a, b))
    found = add(o, o.domain.log(add(o, *terms)), shift)
    nothing = _number(o, -math.inf, a)
    a_is_nothing, b_is_nothing = (_compare(np.equal)(o, x, nothing) for x in (a, b))
    return moved(lambda v, w, x: np.where(a_is_nothing, w, np.where(b_is_nothing, v, x)), a, b, found)


def _clamp(o: Operation, low: Value, x: Value, high: Value) -> Value:
    return extreme(o, extreme(o, x, low, largest=True), high, largest=False)


def _bit_count(x: np.ndarray) -> np.ndarray:
    return np.asarray(
        np.bitwise_count(x.view(f"u{x.dtype.itemsize}"))
        if hasattr(np, "bitwise_count")
        else np.vectorize(lambda v: int(v).bit_count())(x.view(f"u{x.dtype.itemsize}"))
    )


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    bits = 8 * x.dtype.itemsize
    return np.vectorize(lambda v: bits - int(v).bit_length(), otypes=[np.int64])(x.view(f"u{x.dtype.itemsize}"))


def _same(o: Operation, *operands: Value) -> Value:
    return operands[0] if len(o.shapes) == 1 else list(operands)


OPERATORS.update(
    {
        **dict.fromkeys("add add_any add_to".split(), add),
        "sub": lambda o, a, b: add(o, a, neg(o, b)), "mul": mul, "neg": neg, "div": _div, "rem": _rem,
        "max": functools.partial(extreme, largest=True), "min": functools.partial(extreme, largest=False),
        **{name: _compare(f) for name, f in zip(
            "eq ne lt le gt ge".split(),
            (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal), strict=True)},
        **{name: _compare(f) for name, f in zip(
            "eq_to lt_to le_to".split(), (np.equal, np.less, np.less_equal), strict=True)},
        "select_n": _select, "clamp": _clamp, "convert_element_type": _convert, "bitcast_convert_type": _bitcast,
        "and": _integers(np.bitwise_and), "or": _integers(np.bitwise_or, _bits_of),
        "xor": _integers(np.bitwise_xor, _bits_of), "not": _integers(np.invert),
        "shift_left": _integers(_shift(np.left_shift)),
        "shift_right_logical": _integers(_shift(np.right_shift)),
        "shift_right_arithmetic": _integers(_shift(np.right_shift, arithmetic=True)),
        "population_count": _integers(_bit_count), "clz": _integers(_leading_zeros),
        "abs": _abs, "sign": _sign, "integer_pow": _integer_power, "pow": _power,
        "square": lambda o, a: mul(o, a, a), "exp": _exp, "exp2": functools.partial(_exp, scale=math.log(2)),
        "expm1": lambda o, a: add(o, _exp(o, a), _number(o, -1.0, a)),
        "log": lambda o, a: o.domain.log(a), "log1p": lambda o, a: o.domain.log(add(o, a, _number(o, 1.0, a))),
        "sqrt": lambda o, a: o.domain.sqrt(a), "rsqrt": lambda o, a: o.domain.reciprocal(o.domain.sqrt(a)),
        "logistic": _logistic, "is_finite": lambda o, a: o.domain.is_finite(a),
        "one_minus_square": lambda o, a: add(o, _number(o, 1.0, a), neg(o, mul(o, a, a))),
        "complex": lambda o, a, b: Complex(*aligned(a, b)), "real": lambda o, a: a.real, "imag": lambda o, a: a.imag,
        "conj": lambda o, a: Complex(a.real, neg(o, a.imag)) if isinstance(a, Complex) else a,
        "reduce_precision": lambda o, a: o.domain.narrowed(
            a, f"float of {o.params['exponent_bits']} and {o.params['mantissa_bits']} bits"),
        **dict.fromkeys(
            """acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc
            floor igamma igamma_grad_a igammac lgamma log2 nextafter polygamma polynomial random_gamma_grad
            regularized_incomplete_beta round sin sinh tan tanh zeta""".split(), _function),
        **dict.fromkeys(
            """copy copy_p name stop_gradient optimization_barrier pvary pcast mesh_cast sharding_constraint reshard
            layout_constraint gshard_mark gshard_names device_put xla_metadata_value preventive_cse""".split(), _same),
    }
)  # fmt: skip


COMBINE: dict[str, Operator] = {
    "sum": add, "prod": mul, "max": functools.partial(extreme, largest=True),
    "min": functools.partial(extreme, largest=False), "and": lambda o, a, b: a & b, "or": lambda o, a, b: a | b,
    "xor": lambda o, a, b: a ^ b,
}  # fmt: skip
