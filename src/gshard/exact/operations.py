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
from gshard.exact.numbers import INTEGERS, Field, Reals, Residues, Value, moved_residues, residues_of


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


def moved(f: Callable[..., Any], *operands: Value) -> Value:
    """Applies a function that only moves elements, to arrays of one kind; integers become what others are."""
    if any(isinstance(x, Complex) for x in operands):
        parts = [as_complex(x) for x in operands]
        return Complex(moved(f, *(x.real for x in parts)), moved(f, *(x.imag for x in parts)))
    if any(isinstance(x, Residues) for x in operands):
        return moved_residues(f, *(x if isinstance(x, Residues) else residues_of(x) for x in operands))
    return f(*operands)


def reshaped(x: Value, shape: Sequence[int]) -> Value:
    """An array of another shape, lanes included."""
    return moved(lambda v: v.reshape(tuple(shape)), x)


def as_complex(x: Value) -> Complex:
    """Complex numbers as they are, others with imaginary parts 0."""
    if isinstance(x, Complex):
        return x
    zero = np.zeros(x.shape)
    return Complex(x, residues_of(zero) if isinstance(x, Residues) else zero)


def constants(o: Operation, x: Any, shape: Sequence[int], dtype: Any = np.float32) -> Value:
    """Equal numbers of a dtype on all lanes."""
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return as_complex(constants(o, x, shape))
    if jax.dtypes.issubdtype(dtype, np.floating):
        return o.domain.constant(np.full((o.lanes, *shape), x, np.float64), np.float64)
    return np.full((o.lanes, *shape), x, dtype)


def number(o: Operation, x: float, like: Value) -> Value:
    """A number that has as many dimensions as an array."""
    return constants(o, x, (1,) * (like.ndim - 1))


# --- kinds of numbers


def _by_parts(name: str) -> Callable[..., Complex]:
    def run(self: _Complexes, *operands: Any) -> Complex:
        f = getattr(self.d, name)
        parts = ([getattr(x, p) if isinstance(x, Complex) else x for x in operands] for p in ("real", "imag"))
        return Complex(*(f(*part) for part in parts))

    return run


@dataclasses.dataclass(frozen=True)
class _Complexes:
    """Complex numbers, as pairs of numbers of a domain. Methods are those of the domain."""

    d: Any
    noun = "complex numbers"
    add, neg, sum = map(_by_parts, ("add", "neg", "sum"))

    def mul(self, a: Complex, b: Complex, name: str = "mul") -> Complex:
        f, d = getattr(self.d, name), self.d
        real = d.add(f(a.real, b.real), d.neg(f(a.imag, b.imag)))
        return Complex(real, d.add(f(a.real, b.imag), f(a.imag, b.real)))

    dot = functools.partialmethod(mul, name="dot")

    def _square(self, a: Complex) -> Value:
        return self.d.add(self.d.mul(a.real, a.real), self.d.mul(a.imag, a.imag))

    def abs(self, a: Complex) -> Value:
        return self.d.sqrt(self._square(a))

    def reciprocal(self, a: Complex) -> Complex:
        size = self.d.reciprocal(self._square(a))
        return Complex(self.d.mul(a.real, size), self.d.neg(self.d.mul(a.imag, size)))

    def sign(self, a: Complex) -> Complex:
        return self.mul(a, as_complex(self.d.reciprocal(self.abs(a))))

    def power(self, a: Complex, exponent: int) -> Complex:
        base = a if exponent >= 0 else self.reciprocal(a)
        return functools.reduce(self.mul, [base] * abs(exponent), as_complex(self.d.power(a.real, 0)))

    def order(self, a: Complex) -> np.ndarray:
        pairs = np.stack([self.d.order(a.real), self.d.order(a.imag)], -1)
        return np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)[1].reshape(a.shape)

    def compare(self, f: Any, a: Complex, b: Complex, equation: int = 0) -> np.ndarray:
        pairs = (self.d.compare(f, *x) for x in ((a.real, b.real), (a.imag, b.imag)))
        return np.asarray((np.logical_and if f is np.equal else np.logical_or)(*pairs))


def numbers(o: Operation, *operands: Value) -> tuple[Any, list[Value]]:
    """The kind of numbers of operands, and the operands as such numbers, with equally many dimensions."""
    ndim = max(x.ndim for x in operands)
    xs = [x if x.ndim == ndim else reshaped(x, (*x.shape, *(1,) * (ndim - x.ndim))) for x in operands]
    if any(isinstance(x, Complex) for x in xs):
        return _Complexes(o.domain), [x if isinstance(x, Complex) else as_complex(as_floats(o, x)) for x in xs]
    if any(map(is_float, xs)):
        return o.domain, [as_floats(o, x) for x in xs]
    return INTEGERS, xs


def _method(name: str, *leading: Any, notes: bool = False) -> Operator:
    """An operator that kinds of numbers have as a method. ``notes``: the domain notes its outcomes."""

    def run(o: Operation, *operands: Value) -> Value:
        if name != "extreme" and are_bits(o, *operands):
            return _of_bits(name, o, *operands)
        kind, xs = numbers(o, *operands)
        if not hasattr(kind, name):
            raise Undecided(f"'{o.name}' of {kind.noun} has no exact value.")
        return getattr(kind, name)(*leading, *xs, *([id(o.params)] if notes else []))

    return run


# --- elementwise


add, neg, mul, reciprocal = map(_method, ("add", "neg", "mul", "reciprocal"))
exp, log, sqrt = map(_method, ("exp", "log", "sqrt"))
largest, smallest = _method("extreme", np.maximum), _method("extreme", np.minimum)


def _plus(o: Operation, a: Value, x: float) -> Value:
    return add(o, a, number(o, x, a))


def _select(o: Operation, index: Value, *cases: Value) -> Value:
    index = reshaped(index, (*index.shape, *(1,) * (cases[0].ndim - index.ndim)))
    if len(cases) == 2:
        return moved(lambda a, b: np.where(index, b, a), *cases)
    which = np.clip(index, 0, len(cases) - 1)
    return moved(lambda *xs: np.choose(which, np.broadcast_arrays(*xs)[: len(xs)]), *cases)


def _convert(o: Operation, x: Value) -> Value:
    d, old, new = o.domain, o.in_dtypes[0], o.dtype
    if isinstance(x, Complex):
        return x if jax.dtypes.issubdtype(new, np.complexfloating) else x.real
    if jax.dtypes.issubdtype(new, np.complexfloating):
        return as_complex(as_floats(o, x))
    if jax.dtypes.issubdtype(new, np.floating):
        is_narrower = jax.dtypes.issubdtype(old, np.floating) and jax.numpy.finfo(new).bits < jax.numpy.finfo(old).bits
        return d.narrowed(x, new) if is_narrower else as_floats(o, x)
    if is_float(x) and not jax.dtypes.issubdtype(old, np.floating):
        return x  # the bits of floats
    if new == np.bool_:
        return _method("compare", np.not_equal)(o, x, number(o, 0.0, x) if is_float(x) else np.zeros_like(x))
    return d.to_ints(x, new) if is_float(x) else x.astype(new)


# --- bits: those of floats are represented by the floats


def are_bits(o: Operation, *operands: Value) -> bool:
    """Whether an operation is one on the bits of floats."""
    is_whole = bool(o.dtypes) and jax.dtypes.issubdtype(o.dtype, np.integer)
    return is_whole and any(map(is_float, operands))


def _bitcast(o: Operation, x: Value) -> Value:
    floats = [jax.dtypes.issubdtype(dtype, np.floating) for dtype in (o.in_dtypes[0], o.dtype)]
    if is_float(x):
        if not floats[1] and floats[0] and len(o.shape) >= x.ndim:
            raise Undecided("parts of the bits of floats have no exact value.")
        return x  # two floats of 16 bits in one integer keep their dimension
    found = np.ascontiguousarray(x).view(o.dtype).reshape(o.lanes, *o.shape)
    return o.domain.from_bits(found) if floats[1] else found


def _of_bits(name: str, o: Operation, *operands: Value) -> Value:
    """A function of bits. Bits that are added to zeros, and the order of floats as integers, are exact."""
    last = operands[-1]
    if name == "xor" and not is_float(last) and (last == np.iinfo(last.dtype).max).all():
        return operands[0]
    found = _function(dataclasses.replace(o, name=name), *operands)
    if name in ("add", "or", "xor"):
        d, (a, b) = numbers(o, *operands)
        a_is_zero, b_is_zero = (d.compare(np.equal, x, number(o, 0.0, x)) for x in (a, b))
        found = moved(lambda u, v, w: np.where(a_is_zero, v, np.where(b_is_zero, u, w)), a, b, found)
    return found


def _integers(name: str, f: Callable[..., Any]) -> Operator:
    def run(o: Operation, *operands: Value) -> Value:
        kind, xs = numbers(o, *operands)
        if kind is not INTEGERS:
            return _of_bits(name, o, *operands)
        return np.asarray(f(*xs)).astype(xs[0].dtype)

    return run


def _of_jax(name: str) -> Callable[..., Any]:
    """An elementwise function of integers, which JAX runs."""
    return lambda *xs: getattr(jax.lax, name)(*np.broadcast_arrays(*xs))


# --- functions


def _either(of_integers: Callable[..., Any], of_others: Operator) -> Operator:
    """A function of integers, and an operator on other numbers."""

    def run(o: Operation, *operands: Value) -> Value:
        kind, _ = numbers(o, *operands)
        return (_integers("", of_integers) if kind is INTEGERS else of_others)(o, *operands)

    return run


def _function(o: Operation, *operands: Value) -> Value:
    """A function of numbers: its values where they are known, else only that equal operands have equal results."""
    d, xs = numbers(o, *operands)
    if d is not o.domain:
        raise Undecided(f"'{o.name}' of {d.noun} has no exact value.")
    known = [x.real for x in xs]
    rounds = {"floor": np.floor, "ceil": np.ceil, "round": np.rint, "rem": np.fmod}.get(o.name)
    if rounds is not None and all(x is not None for x in known):
        return d.constant(np.asarray(rounds(*known)), np.float64)
    extra = {k: v for k, v in o.params.items() if k in ("y", "m", "n", "rounding_method") and v is not None}
    return d.function(o.name if not extra or isinstance(d, Reals) else f"{o.name} {extra}", *xs)


def _power(o: Operation, a: Value, b: Value) -> Value:
    exponents = None if isinstance(a, Complex) else as_floats(o, b).real
    if exponents is None or len(values := np.unique(exponents)) != 1:
        return _function(o, a, b)
    exponent = float(values[0])
    if 2 * exponent != int(2 * exponent) or abs(exponent) > 1024:
        return _function(o, a, number(o, exponent, a))
    is_whole = exponent == int(exponent)
    power: Any = o.domain.power
    return power(a if is_whole else sqrt(o, a), int(exponent if is_whole else 2 * exponent))


def log_of_sum(o: Operation, a: Value, b: Value) -> Value:
    """log(exp(a) + exp(b))."""
    d, (a, b) = numbers(o, a, b)
    if isinstance(d, Reals):
        return np.logaddexp(a, b)
    shift = d.extreme(np.maximum, a, b)
    shift = moved(lambda v, w: np.where(d.is_finite(shift), v, w), shift, number(o, 0.0, shift))
    found = d.add(d.log(d.add(*(d.exp(d.add(x, d.neg(shift))) for x in (a, b)))), shift)
    a_is_nothing, b_is_nothing = (d.compare(np.equal, x, number(o, -math.inf, x)) for x in (a, b))
    return moved(lambda v, w, x: np.where(a_is_nothing, w, np.where(b_is_nothing, v, x)), a, b, found)


def _same(o: Operation, *operands: Value) -> Value:
    return operands[0] if len(o.shapes) == 1 else list(operands)


def _narrowed(o: Operation, a: Value) -> Value:
    return o.domain.narrowed(a, f"float of {o.params['exponent_bits']} and {o.params['mantissa_bits']} bits")


_COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                "ge": np.greater_equal, "eq_to": np.equal, "lt_to": np.less, "le_to": np.less_equal}  # fmt: skip
_OF_BITS: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    **{name: _of_jax(name) for name in
       "shift_left shift_right_logical shift_right_arithmetic population_count clz".split()},
}  # fmt: skip
OPERATORS.update(
    {
        **dict.fromkeys("add add_any add_to".split(), add), "sub": lambda o, a, b: add(o, a, neg(o, b)),
        "mul": mul, "neg": neg, "div": _either(_of_jax("div"), lambda o, a, b: mul(o, a, reciprocal(o, b))),
        "rem": _either(_of_jax("rem"), _function), "square": lambda o, a: mul(o, a, a),
        "max": _method("extreme", np.maximum, notes=True), "min": _method("extreme", np.minimum, notes=True),
        **{name: _method("compare", f, notes=True) for name, f in _COMPARISONS.items()},
        **{name: _integers(name, f) for name, f in _OF_BITS.items()},
        "select_n": _select, "clamp": lambda o, low, x, high: smallest(o, largest(o, x, low), high),
        "convert_element_type": _convert, "bitcast_convert_type": _bitcast,
        "abs": _method("abs"), "sign": _method("sign"), "pow": _either(np.power, _power),
        "integer_pow": lambda o, a: numbers(o, a)[0].power(a, o.params["y"]),
        "exp": exp, "exp2": lambda o, a: exp(o, mul(o, a, number(o, math.log(2), a))),
        "expm1": lambda o, a: _plus(o, exp(o, a), -1.0), "log": log, "log1p": lambda o, a: log(o, _plus(o, a, 1.0)),
        "sqrt": sqrt, "rsqrt": lambda o, a: reciprocal(o, sqrt(o, a)), "is_finite": _method("is_finite"),
        "logistic": lambda o, a: reciprocal(o, _plus(o, exp(o, neg(o, a)), 1.0)),
        "one_minus_square": lambda o, a: _plus(o, neg(o, mul(o, a, a)), 1.0),
        "complex": lambda o, a, b: Complex(*numbers(o, a, b)[1]), "real": lambda o, a: a.real,
        "imag": lambda o, a: a.imag, "conj": lambda o, a: Complex(as_complex(a).real, neg(o, as_complex(a).imag)),
        "reduce_precision": _narrowed,
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
    "sum": add, "prod": mul, "max": largest, "min": smallest,
    **{name: OPERATORS[name] for name in ("and", "or", "xor")},
}  # fmt: skip
