"""The two kinds of numbers in which programs run: residues of a finite field, which are exact, and float64.

Arrays have a leading dimension of *lanes*: for each draw of random numbers, all devices. Integers and booleans are
NumPy arrays in both domains. Floats are NumPy arrays of float64 in ``Reals``, and ``Residues`` in ``Field``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from gshard.core.planning_tables import tabulated

# P = 2 Q + 1, both are prime, and all primes below 48 are squares modulo P. So -1 is no square, positive numbers with
# small factors are squares, and squares count as the positive numbers.
P = 2129105039
Q = 1064552519
_HALF_P = (P - 1) // 2  # x to this power is 1 for squares, P - 1 for others
_ROOT = (P + 1) // 4  # x to this power is a root of a square, and is a square itself
_BASE = 5**7 % P  # its powers are all squares

# Symbols: numbers that no residue stands for, as elements of ``Residues.p``.
NAN, INFINITY, MINUS_INFINITY, HUGE, MINUS_HUGE, MINUS_NAN = range(P, P + 6)
_AS_FLOATS = np.array([math.nan, math.inf, -math.inf, 1e150, -1e150, -math.nan])
_IS_HUGE = 1e100  # floats beyond this are symbols
MASK = 1e9  # float constants of at least this size are masks: any other number vanishes beside them

Ints = np.ndarray  # integers or booleans


Exponent = tuple[Any, Any]  # residues modulo P and, for polynomials, modulo Q


@dataclasses.dataclass(frozen=True, slots=True)
class Residues:
    """An array of numbers ``v exp(x)``, where v is known modulo P.

    Attributes:
        p: the residues of v modulo P, or symbols.
        q: the residues modulo Q of v without k (see ``known``), for polynomials and fractions of arguments. ``exp``
            maps these to residues modulo P, so that ``exp(a + b) = exp(a) exp(b)`` holds. -1 after other functions;
            None if all are -1.
        x: the exponent x; None if it is 0. x is a sum of maxima (the shift of a softmax).
        known: a part of v whose exponential is known, ``(k, c, t)`` with exp(k) = c exp(t): maxima and logarithms.
        real: the numbers themselves, if they depend on constants and integers only. They decide comparisons.
        has_symbols: whether elements of ``p`` may be symbols.
        degree: a bound of the degree as a polynomial of arguments, of results of functions, and of reciprocals.
        is_positive: whether no number is negative: exponentials, squares, and sums and products of such.
    """

    p: np.ndarray
    q: Any = None
    x: Exponent | None = None
    known: tuple[Exponent, np.ndarray, Exponent] | None = None
    real: np.ndarray | None = None
    has_symbols: bool = False
    degree: int = 1
    is_positive: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, lanes first."""
        return self.p.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions, lanes included."""
        return self.p.ndim


Value = Any  # Residues, or a NumPy array
Move = Callable[..., Any]  # a function that only moves elements


def power(x: np.ndarray, exponent: int, modulus: int = P) -> np.ndarray:
    """``x ** exponent`` modulo a prime, for an exponent of at least 0."""
    result = np.ones_like(x)
    while exponent:
        if exponent & 1:
            result = result * x % modulus
        exponent >>= 1
        if exponent:
            x = x * x % modulus
    return result


def inverse(x: np.ndarray, modulus: int = P) -> np.ndarray:
    """The inverses modulo a prime; 0 for 0. Takes six products for each element."""
    flat = np.where(x == 0, 1, x).ravel()
    if flat.size <= 32:
        return np.where(x == 0, 0, power(flat, modulus - 2, modulus).reshape(x.shape))
    even, odd = flat[0 : flat.size // 2 * 2 : 2], flat[1::2]
    of_pairs = inverse(even * odd % modulus, modulus)
    result = np.empty_like(flat)
    result[0 : even.size * 2 : 2] = of_pairs * odd % modulus
    result[1::2] = of_pairs * even % modulus
    if flat.size % 2:
        result[-1] = pow(int(flat[-1]), -1, modulus)
    return np.where(x == 0, 0, result.reshape(x.shape))


def product(a: np.ndarray, b: np.ndarray, modulus: int = P) -> np.ndarray:
    """Products of matrices modulo a prime, ``[..., m, k] @ [..., k, n]``, exact in float64: parts of bits of a."""
    columns = a.shape[-1]
    bits, most = (16, 64) if columns <= 64 else (11, 2048)  # sums of ``most`` products of so many bits and 31 fit
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.int64)
    for first in range(0, columns, most):
        left, right = a[..., first : first + most], b[..., first : first + most, :].astype(np.float64)
        for shift in range(0, 31, bits):
            part = ((left >> shift) & ((1 << bits) - 1)).astype(np.float64) @ right
            total = (total + part.astype(np.int64) % modulus * (1 << shift)) % modulus
    return total


@tabulated(1024)
def _powers_of_base() -> list[np.ndarray]:
    tables = []
    for shift in (0, 10, 20):
        step, row = pow(_BASE, 1 << shift, P), [1]
        for _ in range(1023):
            row.append(row[-1] * step % P)
        tables.append(np.array(row, np.int64))
    return tables


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mixes 64 bits, as the generator splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@tabulated(1024)
def key_of(name: str) -> np.uint64:
    """A number of 64 bits for a name."""
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def sign_of(p: np.ndarray) -> np.ndarray:
    """1 for squares, 0 for 0, -1 for other residues: signs that products keep."""
    signs = power(p, _HALF_P)
    return np.where(signs == P - 1, -1, signs)


def exact(x: np.ndarray, modulus: int) -> np.ndarray:
    """The residues of finite float64 numbers."""
    mantissa, exponent = np.frexp(x)
    whole = (mantissa * 2.0**53).astype(np.int64) % modulus
    exponents, place = np.unique(exponent, return_inverse=True)
    scale = np.array([pow(2, int(e) - 53, modulus) for e in exponents], np.int64)
    return whole * scale[place].reshape(x.shape) % modulus


_MOST_DEGREE = 4096
_MOST_FRACTIONS = 4096  # of one constant; numbers of larger tables stay as they are


def simplest(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators of the simplest fractions that a dtype rounds to these numbers, 0.3333333 as 1/3."""
    values, place = np.unique(x, return_inverse=True)
    close = float(jax.numpy.finfo(dtype).eps) / 2
    fractions = [_simplest(float(v), close) for v in (*values, 0.0)]
    tops, bottoms = (np.array(n, object)[place].reshape(x.shape) for n in zip(*fractions, strict=True))
    return tops, bottoms


@tabulated(65536)
def _simplest(x: float, close: float) -> tuple[int, int]:
    if x == int(x):
        return int(x), 1
    true, most = Fraction(x), 2
    while True:
        found = true.limit_denominator(most)
        if abs(found - true) <= abs(true) * Fraction(close):
            return found.numerator, found.denominator
        most *= 2


def moved_residues(f: Move, *operands: Residues) -> Residues:
    """Applies a function that only moves elements to all that is known of them."""

    def part(arrays: Sequence[np.ndarray | None], default: int) -> np.ndarray:
        full = []
        for x, o in zip(arrays, operands, strict=True):
            if x is None:
                x = np.full((1,) * o.ndim, default)
            full.append(x if x.shape == o.shape else np.broadcast_to(x, o.shape))
        return f(*full)

    def exponent(given: Sequence[Exponent | None]) -> Exponent:
        zero = np.zeros((), np.int64)
        pairs: list[Exponent] = [e or (zero, zero) for e in given]
        has_q = any(e is not None and e[1] is not None for e in given)
        return part([p for p, _ in pairs], 0), part([q for _, q in pairs], -1) if has_q else None

    x = exponent([o.x for o in operands]) if any(o.x for o in operands) else None
    known = None
    if any(o.known for o in operands):
        k = exponent([o.known[0] if o.known else None for o in operands])
        t = exponent([o.known[2] if o.known else None for o in operands])
        known = k, part([o.known[1] if o.known else None for o in operands], 1), t
    return Residues(
        f(*(o.p for o in operands)),
        part([o.q for o in operands], -1) if any(o.q is not None for o in operands) else None,
        x,
        known,
        None if any(o.real is None for o in operands) else f(*(o.real for o in operands)),
        any(o.has_symbols for o in operands),
        max(o.degree for o in operands),
        all(o.is_positive for o in operands),
    )


def _in_q(f: Callable[..., Any], *operands: Any) -> Any:
    """An operation modulo Q, on residues of which some may be unknown."""
    if any(q is None for q in operands):
        return None
    found = f(*operands) % Q
    unknown = [q < 0 for q in operands if q.size and q.min() < 0]
    return np.where(functools.reduce(np.logical_or, unknown), -1, found) if unknown else found


def _plus(a: Exponent, b: Exponent) -> Exponent:
    return (a[0] + b[0]) % P, _in_q(np.add, a[1], b[1])


def _minus(a: Exponent) -> Exponent:
    return -a[0] % P, _in_q(np.negative, a[1])


def _of_shape(a: Exponent | None, shape: Sequence[int]) -> Exponent | None:
    if a is None:
        return None
    return np.broadcast_to(a[0], shape), None if a[1] is None else np.broadcast_to(a[1], shape)


def _chosen(where: np.ndarray, a: Exponent, b: Exponent) -> Exponent:
    qa, qb = (np.int64(-1) if e[1] is None else e[1] for e in (a, b))
    return np.where(where, a[0], b[0]), np.where(where, qa, qb)


def residues_of(x: np.ndarray) -> Residues:
    """Integers, or real numbers that are whole, as residues."""
    real = x.astype(np.float64)
    x = x.astype(np.int64) if x.dtype != np.uint64 else x
    return Residues((x % P).astype(np.int64), (x % Q).astype(np.int64), real=real, degree=0)


class Field:
    """Residues modulo P, in which sums and products are exact in every order."""

    def __init__(self, draws: int, seed: int, keeps_dtypes: bool = False) -> None:
        self.draws = draws  # how many random numbers stand for each element of an argument
        self.seed = seed
        self.keeps_dtypes = keeps_dtypes  # whether a conversion to a narrower dtype is a function of its own
        self.identities: set[str] = set()  # what is assumed of functions, as text
        self.stand_ins: set[str] = set()  # none: see ``Reals``
        self.degree = 1  # the largest degree so far
        self.reciprocals = 0  # how many numbers have been inverted
        self.outcomes: dict[int, int] = {}  # of comparisons of random numbers, by equation: 1 false, 2 true, 3 both

    # --- making numbers

    def random(self, name: str, shape: Sequence[int]) -> Residues:
        """Random numbers for an argument, the same ones for each call with a name."""
        rng = np.random.default_rng([self.seed, int(key_of(name)) % 2**32])
        wanted = (self.draws, *shape)
        return Residues(rng.integers(1, P, wanted), rng.integers(1, Q, wanted))

    def constant(self, x: np.ndarray, dtype: Any) -> Residues:
        """Numbers that a program contains."""
        real = np.asarray(x, np.float64)
        finite = np.where(np.isfinite(real), real, 0.0)
        small = np.where(np.abs(finite) < MASK, finite, 0.0)
        if 0 < len(np.unique(small)) <= _MOST_FRACTIONS:
            tops, bottoms = simplest(small, dtype)
            p, q = ((tops % m).astype(np.int64) * inverse((bottoms % m).astype(np.int64), m) % m for m in (P, Q))
        else:
            p, q = exact(small, P), exact(small, Q)
        has_symbols = bool((small != real).any() or not np.isfinite(real).all())
        if has_symbols:
            if np.isfinite(real[small != real]).any():
                self.identities.add(f"constants of at least {MASK:g} are masks")
            p = self._with_symbols(p, np.where(np.isfinite(real), np.sign(real) * 1e150, real), small == real)
            p = np.where(Reals.is_minus_nan(real), MINUS_NAN, p)
        is_positive = bool((real >= 0).all())
        return Residues(p, q, real=real, has_symbols=has_symbols, degree=0, is_positive=is_positive)

    def from_bits(self, x: np.ndarray) -> Residues:
        """Floats whose bits a program has computed."""
        real = x.astype(np.float64)
        finite = np.where(np.isfinite(real), real, 0.0)
        p, has_symbols = exact(finite, P), not bool(np.isfinite(real).all())
        if has_symbols:
            p = np.where(Reals.is_minus_nan(real), MINUS_NAN, self._with_symbols(p, real, np.isfinite(real)))
        return Residues(p, exact(finite, Q), real=real, has_symbols=has_symbols, degree=0)

    def to_ints(self, x: Residues, dtype: Any) -> np.ndarray:
        """Floats as integers: the numbers themselves if they are known, else a function of them."""
        if x.real is not None:
            with np.errstate(invalid="ignore"):
                return x.real.astype(dtype)
        return (self._hashed("int", x) % np.uint64(1 << 30)).astype(dtype)

    def decides(self, x: Residues) -> np.ndarray | None:
        """The numbers themselves, if constants and integers determine them."""
        return x.real

    # --- symbols

    def _as_floats(self, x: Residues, signs: bool) -> np.ndarray:
        """Symbols as floats; other numbers as their signs, or as 0."""
        where = x.p >= P
        others = np.where(x.p > P // 2, -1.0, np.where(x.p == 0, 0.0, 1.0)) if signs else np.zeros(x.shape)
        return np.where(where, _AS_FLOATS[np.where(where, x.p - P, 0)], others)

    def _with_symbols(self, p: np.ndarray, floats: np.ndarray, finite: np.ndarray | None = None) -> np.ndarray:
        """Residues with symbols where floats are no ordinary numbers."""
        with np.errstate(invalid="ignore"):
            finite = np.abs(floats) < _IS_HUGE if finite is None else finite
            p = np.where(finite, p, np.where(floats > 0, HUGE, MINUS_HUGE))
        p = np.where(np.isposinf(floats), INFINITY, np.where(np.isneginf(floats), MINUS_INFINITY, p))
        return np.where(np.isnan(floats), NAN, p)

    def _symbolic(
        self, ring: Callable[..., np.ndarray], floats: Callable[..., np.ndarray], signs: bool, *operands: Residues
    ) -> np.ndarray:
        """Applies an operation of the ring to residues, and the same operation of floats to symbols."""
        p = ring(*(np.where(x.p >= P, 0, x.p) for x in operands))
        with np.errstate(all="ignore"):
            found = floats(*(self._as_floats(x, signs) for x in operands))
        return self._with_symbols(p, found)

    def _apply(
        self,
        ring: Callable[..., np.ndarray],
        floats: Callable[..., np.ndarray],
        signs: bool,
        *operands: Residues,
        **parts: Any,
    ) -> Residues:
        """The result of an operation of rings, ``ring(modulus, *residues)``."""
        if parts.get("known") is None:
            operands = tuple(map(self._without_known, operands))
        has_symbols = any(x.has_symbols for x in operands)
        at_p = functools.partial(ring, P)
        p = self._symbolic(at_p, floats, signs, *operands) if has_symbols else at_p(*(x.p for x in operands))
        q = None
        if all(x.q is not None for x in operands):
            q = ring(Q, *(x.q for x in operands))
            if any(x.q.size and x.q.min() < 0 for x in operands):
                q = self._unknown_in(q, floats, operands)
        real = None
        if all(x.real is not None for x in operands):
            with np.errstate(all="ignore"):
                real = floats(*(x.real for x in operands))
        has_symbols = has_symbols and bool((p >= P).any())
        parts = {"is_positive": all(x.is_positive for x in operands), **parts}
        return Residues(p, q, real=real, has_symbols=has_symbols, **parts)

    def _unknown_in(self, q: np.ndarray, floats: Callable[..., np.ndarray], operands: Sequence[Residues]) -> np.ndarray:
        """Residues modulo Q without those of results for which an operand is unknown: NaN spreads as they do."""
        with np.errstate(all="ignore"):
            spread = floats(*(np.where(x.q < 0, math.nan, 1.0) for x in operands))
        return np.where(np.isnan(spread), -1, q)

    def _without_known(self, a: Residues) -> Residues:
        if a.known is None:
            return a
        return dataclasses.replace(a, q=_in_q(np.add, a.q, a.known[0][1]), known=None)

    @property
    def chance(self) -> float:
        """A bound of the probability that one draw does not tell different programs apart (Schwartz and Zippel).

        To multiply a polynomial by the numbers that it divides by makes its degree ``reciprocals`` times larger.
        """
        bound = self.degree * (1 + self.reciprocals) / P
        if bound > 0.5:
            self.identities.add("the degree has no useful bound: each draw counts as one chance in two")
        return min(bound, 0.5)

    def _of_degree(self, degree: int) -> int:
        """The degree of a product; beyond a bound its results count as random numbers of their own."""
        if degree > _MOST_DEGREE:
            self.identities.add(f"numbers of a degree above {_MOST_DEGREE} count as random")
            degree = 1
        self.degree = max(self.degree, degree)
        return degree

    # --- sums and products

    def flat(self, x: Residues) -> Residues:
        """The numbers with exponent 0."""
        if x.x is None:
            return x
        scale = Residues(self._exp_of(*x.x))
        ring = lambda p, s: p * s % P  # noqa: E731
        p = self._symbolic(ring, np.multiply, True, x, scale) if x.has_symbols else ring(x.p, scale.p)
        return dataclasses.replace(x, p=p, q=None, x=None, known=None, real=None)

    def add(self, a: Residues, b: Residues) -> Residues:
        """a + b."""
        shape, x = np.broadcast_shapes(a.shape, b.shape), None
        if a.x is not None or b.x is not None:
            zero = self._zero(a)
            of_a, of_b = a.x or zero, b.x or zero
            of_a, of_b = _chosen(a.p == 0, of_b, of_a), _chosen(b.p == 0, of_a, of_b)
            of_a = _chosen(a.p == 0, of_b, of_a)
            if (of_a[0] == of_b[0]).all():
                x = _of_shape(of_a, shape)
            else:
                a, b = self.flat(a), self.flat(b)
        known = None
        if (a.known or b.known) and x is None:
            (ka, ca, ta), (kb, cb, tb) = self._known(a), self._known(b)
            known = _plus(ka, kb), ca * cb % P, _plus(ta, tb)
        degree = max(a.degree, b.degree)
        return self._apply(lambda m, p, q: (p + q) % m, np.add, False, a, b, x=x, known=known, degree=degree)

    def _zero(self, a: Residues) -> Exponent:
        zero = np.zeros((1,) * a.ndim, np.int64)
        return zero, zero

    def _known(self, a: Residues) -> tuple[Exponent, np.ndarray, Exponent]:
        zero = self._zero(a)
        return a.known or (zero, zero[0] + 1, zero)

    def neg(self, a: Residues) -> Residues:
        """-a."""
        known = None
        if a.known:
            k, c, t = a.known
            known = _minus(k), inverse(c), _minus(t)
        negative = lambda m, p: -p % m  # noqa: E731
        return self._apply(negative, np.negative, False, a, x=a.x, known=known, degree=a.degree, is_positive=False)

    def mul(self, a: Residues, b: Residues) -> Residues:
        """a b."""
        shape = np.broadcast_shapes(a.shape, b.shape)
        x = _of_shape(a.x if b.x is None else b.x if a.x is None else _plus(a.x, b.x), shape)
        known = None
        if a.known or b.known:
            known = self._times(a, b) if a.known else self._times(b, a)
        degree = self._of_degree(a.degree + b.degree)
        is_positive = a is b or (a.is_positive and b.is_positive)
        parts: dict[str, Any] = {"x": x, "known": known, "degree": degree, "is_positive": is_positive}
        return self._apply(lambda m, p, q: p * q % m, np.multiply, True, a, b, **parts)

    def _times(self, a: Residues, factor: Residues) -> tuple[Exponent, np.ndarray, Exponent] | None:
        """What is known of the exponential of a constant times a."""
        if factor.real is None or factor.x is not None or factor.has_symbols:
            return None
        k, c, t = self._known(a)
        if (c != 1).any():
            numbers = np.unique(factor.real)
            if len(numbers) != 1 or numbers[0] != int(numbers[0]) or abs(numbers[0]) > 64:
                return None
            c = power(c if numbers[0] > 0 else inverse(c), abs(int(numbers[0])))
        scaled = lambda e: (e[0] * factor.p % P, _in_q(np.multiply, e[1], factor.q))  # noqa: E731
        return scaled(k), c, scaled(t)

    def reciprocal(self, a: Residues) -> Residues:
        """1 / a."""
        zeros = a.p == 0
        has_zeros = bool(zeros.any())
        x = None if a.x is None else _minus(a.x)
        self.reciprocals += 0 if a.real is not None else a.p.size // self.draws
        found = self._apply(lambda m, p: inverse(p, m), np.reciprocal, True, a, x=x, degree=min(a.degree, 1))
        if not has_zeros:
            return found
        return dataclasses.replace(found, p=np.where(zeros, INFINITY, found.p), has_symbols=True)

    def power(self, a: Residues, exponent: int) -> Residues:
        """a to a whole power."""
        if exponent < 0:
            return self.power(self.reciprocal(a), -exponent)
        x = None if a.x is None else (a.x[0] * exponent % P, _in_q(lambda q: q * exponent, a.x[1]))
        degree = self._of_degree(a.degree * exponent)
        parts: dict[str, Any] = {"x": x, "degree": degree, "is_positive": a.is_positive or exponent % 2 == 0}
        return self._apply(lambda m, p: power(p, exponent, m), lambda v: v**exponent, True, a, **parts)

    def sum(self, a: Residues, axes: tuple[int, ...]) -> Residues:
        """The sum over dimensions (lanes are dimension 0)."""
        x = None
        if a.x is not None:
            x = self._common(a, axes)
            a = a if x is not None else self.flat(a)
        return self._apply(lambda m, p: p.sum(axes) % m, lambda v: v.sum(axes), False, a, x=x, degree=a.degree)

    def _common(self, a: Residues, axes: tuple[int, ...]) -> Exponent | None:
        """The exponents of the sums over dimensions, if all numbers of a sum have the same or are 0."""
        assert a.x is not None
        if any(not a.shape[d] for d in axes):
            return None
        counts = a.p != 0
        largest = np.where(counts, a.x[0], -1).max(axes, keepdims=True)
        if (counts & (a.x[0] != largest)).any():
            return None
        q = None if a.x[1] is None else np.where(counts, a.x[1], -1).max(axes)
        return np.maximum(largest, 0).squeeze(axes), q

    def dot(self, a: Residues, b: Residues) -> Residues:
        """Products of matrices: ``[lanes, batch, m, k] @ [lanes, batch, k, n]``."""
        x = None
        if a.x is not None or b.x is not None:
            xa = None if a.x is None else self._common(a, (3,))
            xb = None if b.x is None else self._common(b, (2,))
            a, b = (v if v.x is None or common is not None else self.flat(v) for v, common in ((a, xa), (b, xb)))
            if xa is not None or xb is not None:
                zero = (np.zeros((1, 1, 1, 1), np.int64),) * 2
                rows: Any = zero if xa is None else tuple(e if e is None else e[:, :, :, None] for e in xa)
                columns: Any = zero if xb is None else tuple(e if e is None else e[:, :, None, :] for e in xb)
                x = _of_shape(_plus(rows, columns), (*a.shape[:3], b.shape[3]))
        degree = self._of_degree(a.degree + b.degree)
        return self._apply(lambda m, p, q: product(p, q, m), np.matmul, True, a, b, x=x, degree=degree)

    # --- functions

    def _draw_keys(self, lanes: int) -> np.ndarray:
        keys = _mixed(
            np.arange(1, self.draws + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self.seed)
        )
        return np.repeat(keys, lanes // self.draws)

    def _hashed(self, name: str, *operands: Residues | Ints) -> np.ndarray:
        """A number of 64 bits for the elements of all operands at a position."""
        keys = self._draw_keys(max(x.shape[0] for x in operands)) ^ key_of(name)
        found: Any = keys.reshape(-1, *(1,) * (operands[0].ndim - 1))
        for x in operands:
            bits = self.flat(x).p if isinstance(x, Residues) else x.astype(np.int64)
            found = _mixed((found ^ bits.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        return np.asarray(found)

    def function(self, name: str, *operands: Value) -> Residues:
        """An unknown function: equal operands have equal results."""
        p = (self._hashed(name, *operands) % np.uint64(P)).astype(np.int64)
        nan = [self.is_nan(x) for x in operands if isinstance(x, Residues) and x.has_symbols]
        if nan:
            p = np.where(functools.reduce(np.logical_or, nan), NAN, p)
        return Residues(p, has_symbols=bool(nan))

    def of_arrays(self, name: str, results: Sequence[tuple[Sequence[int], Any]], rows: Sequence[Value]) -> list[Value]:
        """A function of whole rows ``[lanes, row, elements]``: for each result, ``[lanes, row, *shape]`` of a dtype."""
        digest: Any = None
        for row in rows:
            places = np.broadcast_to(np.arange(row.shape[2]), row.shape)
            of_row = self._hashed(name, row, places).sum(2)
            digest = of_row if digest is None else _mixed(digest * np.uint64(0x9E3779B97F4A7C15) ^ of_row)
        found: list[Value] = []
        for i, (shape, dtype) in enumerate(results):
            places = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(i << 40)
            bits = _mixed(digest[:, :, None] + _mixed(places)).reshape(*digest.shape, *shape)
            whole = jax.dtypes.issubdtype(dtype, np.integer) or jax.dtypes.issubdtype(dtype, np.bool_)
            found.append(
                (bits & np.uint64(1)).astype(dtype) if whole else Residues((bits % np.uint64(P)).astype(np.int64))
            )
        return found

    def _exp_of(self, p: np.ndarray, q: np.ndarray | None) -> np.ndarray:
        """Exponentials: squares. Of polynomials they are powers of one base; of x and -x they are inverses."""
        if q is not None:
            first, second, third = (t[(q >> s) & 1023] for t, s in zip(_powers_of_base(), (0, 10, 20), strict=True))
            found = first * second % P * third % P
            return np.where(q < 0, self._exp_of(p, None), found) if (q < 0).any() else found
        is_upper = p > P // 2
        bits = self._hashed("exp", np.where(is_upper, P - p, p))
        found = (bits % np.uint64(P - 1)).astype(np.int64) + 1
        found = found * found % P
        return np.where(is_upper, inverse(found), np.where(p == 0, 1, found))

    def exp(self, a: Residues) -> Residues:
        """exp(a)."""
        a = self.flat(a)
        k, c, t = self._known(a)
        v = np.where(a.p >= P, 0, a.p) if a.has_symbols else a.p
        p = self._exp_of((v - k[0]) % P, a.q) * c % P
        x = _of_shape(t, p.shape) if a.known and (t[0] != 0).any() else None
        has_symbols = False
        if a.has_symbols:
            floats = self._as_floats(a, False)
            grows = np.where(np.isnan(floats) | (floats == 0), floats, np.where(floats > 0, math.inf, 0))
            p = np.where(floats < 0, 0, self._with_symbols(p, grows))
            has_symbols = bool((p >= P).any())
        real = None if a.real is None else _quiet(np.exp, a.real)
        return Residues(p, x=x, real=real, has_symbols=has_symbols, is_positive=True)

    def log(self, a: Residues) -> Residues:
        """log(a). The part that is known of the result is all of it."""
        zeros = a.p == 0
        p = (self._hashed("log", Residues(a.p)) % np.uint64(P)).astype(np.int64)
        p = np.where(a.p == 1, 0, p)
        t = self._zero(a) if a.x is None else a.x
        p = (p + t[0]) % P
        known = (p, None), np.where(zeros | (a.p >= P), 1, a.p), t
        has_symbols = bool(a.has_symbols or zeros.any())
        if has_symbols:
            p = np.where(zeros, MINUS_INFINITY, np.where(a.p >= P, np.where(self.is_nan(a), NAN, INFINITY), p))
        real = None if a.real is None else _quiet(np.log, a.real)
        return Residues(p, np.zeros_like(p), known=known, real=real, has_symbols=has_symbols)

    def sqrt(self, a: Residues) -> Residues:
        """The root of a; of a number that counts as negative the root of -a."""
        x = None
        if a.x is not None:
            x = a.x[0] * ((P + 1) // 2) % P, _in_q(lambda q: q * ((Q + 1) // 2), a.x[1])
        root = lambda m, p: power(p, _ROOT)  # noqa: E731
        of_p = dataclasses.replace(a, q=None)
        of_floats = lambda v: np.sqrt(np.where(np.isfinite(v), np.abs(v), v))  # noqa: E731
        return self._apply(root, of_floats, True, of_p, x=x, is_positive=True)

    def sign(self, a: Residues) -> Residues:
        """-1, 0 or 1."""
        if a.real is not None:
            return self.constant(np.sign(a.real), np.float64)
        return self.from_signs(self._signs(a))

    def from_signs(self, signs: np.ndarray) -> Residues:
        """Numbers -1, 0 and 1."""
        return Residues(signs % P, signs % Q, degree=0, is_positive=bool((signs >= 0).all()))

    def narrowed(self, a: Residues, dtype: Any) -> Residues:
        """The conversion to a dtype."""
        if not self.keeps_dtypes:
            self.identities.add("conversions between float dtypes change nothing")
            return a
        flat = self.flat(a)
        found = self.function(f"as {dtype}", flat)
        # What has this dtype already is not rounded again: results are marked by their lowest bits.
        kept = (flat.p == 0) | (flat.p >= P) | (flat.p % 4096 == int(key_of(str(dtype)) % np.uint64(4096)))
        marked = found.p // 4096 * 4096 + int(key_of(str(dtype)) % np.uint64(4096))
        p = np.where(kept, flat.p, np.where(marked < P, marked, marked - 4096))
        return Residues(p, real=a.real, has_symbols=a.has_symbols)

    # --- order

    def rank(self, a: Residues) -> np.ndarray:
        """Integers in a random order of the numbers, in which -a is opposite to a."""
        a = self.flat(a)
        symbols = a.p >= P
        p = np.where(symbols, 0, a.p) if a.has_symbols else a.p
        is_upper = p > P // 2
        ranks = (self._hashed("order", np.where(is_upper, P - p, p)) >> np.uint64(3)).astype(np.int64) | 1
        ranks = np.where(p == 0, 0, np.where(is_upper, -ranks, ranks))
        if a.has_symbols:
            of_symbols = np.array([0, 2**62 + 2, -(2**62) - 2, 2**62, -(2**62), 0], np.int64)
            ranks = np.where(symbols, of_symbols[np.where(symbols, a.p - P, 0)], ranks)
        return ranks

    def is_nan(self, a: Residues) -> np.ndarray:
        """Where a is NaN."""
        return (a.p == NAN) | (a.p == MINUS_NAN)

    def is_minus_nan(self, a: Residues) -> np.ndarray:
        """Where a is NaN with a sign, of constants and bits only."""
        return a.p == MINUS_NAN

    def is_finite(self, a: Residues) -> np.ndarray:
        """Where a is neither NaN nor infinite."""
        return (a.p < P) | (a.p == HUGE) | (a.p == MINUS_HUGE)

    def pair(self, a: Residues, b: Residues) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of two arrays that can be compared."""
        if a.real is not None and b.real is not None:
            return a.real, b.real
        for x, y, turn in ((a, b, 1), (b, a, -1)):  # x is compared with 0
            if y.real is not None and not y.real.any():
                signs = self._signs(x) * turn
                return signs, np.zeros_like(signs)
        return self.rank(a), self.rank(b)

    def _signs(self, a: Residues) -> np.ndarray:
        """The signs of numbers, which products keep: squares count as positive."""
        if a.is_positive:
            return (a.p != 0).astype(np.int64)
        signs = sign_of(np.where(a.p >= P, 0, a.p) if a.has_symbols else a.p)
        if not a.has_symbols:
            return signs
        return np.where(a.p >= P, np.array([0, 1, -1, 1, -1])[np.where(a.p >= P, a.p - P, 0)], signs)

    def note_outcomes(self, equation: int, a: Residues, b: Residues, found: np.ndarray) -> None:
        """Notes which outcomes a comparison of random numbers has had; those that a constant decides do not count."""
        is_open = not any((x.real is not None and np.isinf(x.real).all()) or x.is_positive for x in (a, b))
        if is_open and found.size and (a.real is None or b.real is None):
            now = 2 * int(found.any()) + int(not found.all())
            self.outcomes[equation] = self.outcomes.get(equation, 0) | now

    def as_maximum(self, a: Residues) -> Residues:
        """Marks maxima, whose exponentials stay symbols: a softmax does not depend on what is subtracted."""
        a = self._without_known(self.flat(a))
        k = np.where(a.p >= P, 0, a.p) if a.has_symbols else a.p, a.q
        return dataclasses.replace(a, q=np.zeros_like(a.p), known=(k, np.ones((1,) * a.ndim, np.int64), k))

    from_ints = staticmethod(residues_of)

    def differs(self, a: Value, b: Value) -> np.ndarray:
        """Where two arrays are not equal."""
        if isinstance(a, Residues):
            a, b = self.flat(a), self.flat(b)
            return np.asarray((a.p != b.p) & ~(self.is_nan(a) & self.is_nan(b)))
        return np.asarray(a != b)


def _quiet(f: Callable[..., Any], *operands: Any) -> Any:
    with np.errstate(all="ignore"):
        return f(*operands)


class Reals:
    """Numbers of float64. A difference of residues is a difference if these differ, too."""

    keeps_dtypes = False

    def __init__(self, draws: int, seed: int) -> None:
        self.draws = draws  # as in ``Field``
        self.seed = seed
        self.identities: set[str] = set()
        self.stand_ins: set[str] = set()  # functions for which another one stands

    def random(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """Random numbers for an argument."""
        rng = np.random.default_rng([self.seed, int(key_of(name)) % 2**32])
        return rng.standard_normal((self.draws, *shape))

    def constant(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        """Numbers that a program contains."""
        tops: Any = np.asarray(x, np.float64)
        bottoms: Any = 1.0
        if x.size and np.isfinite(x).all() and len(np.unique(x)) <= _MOST_FRACTIONS and np.abs(x).max() < MASK:
            tops, bottoms = (n.astype(np.float64) for n in simplest(tops, dtype))
        return tops / bottoms

    from_ints = from_bits = flat = as_maximum = from_signs = staticmethod(lambda x: np.asarray(x, np.float64))
    decides = staticmethod(lambda x: x)
    rank = staticmethod(lambda x: x)
    pair = staticmethod(lambda a, b: (a, b))
    is_nan, is_finite, sign = np.isnan, np.isfinite, np.sign
    note_outcomes = staticmethod(lambda equation, a, b, found: None)
    is_minus_nan = staticmethod(lambda x: np.isnan(x) & np.signbit(x))
    add, neg, mul, dot = np.add, np.negative, np.multiply, np.matmul
    exp, log, sqrt, reciprocal = (
        staticmethod(functools.partial(_quiet, f)) for f in (np.exp, np.log, np.sqrt, np.reciprocal)
    )
    sum: Any = staticmethod(np.sum)

    def to_ints(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        """Floats as integers."""
        return np.asarray(_quiet(x.astype, dtype))

    def power(self, a: np.ndarray, exponent: int) -> np.ndarray:
        """a to a whole power."""
        return np.asarray(_quiet(np.float_power, a, exponent))

    def narrowed(self, a: np.ndarray, dtype: Any) -> np.ndarray:
        """The conversion to a dtype."""
        return a

    def function(self, name: str, *operands: np.ndarray) -> np.ndarray:
        """A function of NumPy or SciPy; any fixed one where they have none."""
        f = _FUNCTIONS.get(name)
        if f is None:
            self.stand_ins.add(name)
            f = lambda *xs: np.sin(sum((i + 1.3) * np.asarray(x, np.float64) for i, x in enumerate(xs)))  # noqa: E731
        return np.asarray(_quiet(f, *operands), np.float64)

    def of_arrays(self, name: str, results: Sequence[tuple[Sequence[int], Any]], rows: Sequence[Value]) -> list[Value]:
        """Some fixed function of whole rows, as in ``Field``."""
        self.stand_ins.add(name)
        digest: Any = 0.0
        for i, row in enumerate(rows):
            digest = digest + (row * np.cos(np.arange(row.shape[2]) * 1.7 + i)).sum(2)
        found = []
        for i, (shape, dtype) in enumerate(results):
            places = np.arange(math.prod(shape)) + 0.3 * i
            numbers = np.sin(digest[:, :, None] + places).reshape(*digest.shape, *shape)
            found.append(numbers if jax.dtypes.issubdtype(dtype, np.inexact) else (numbers > 0).astype(dtype))
        return found

    def differs(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Where two arrays are not nearly equal."""
        if a.dtype.kind != "f":
            return np.asarray(a != b)
        finite = np.abs(np.where(np.isfinite(b), b, 0.0))
        near = 1e-6 * np.maximum(finite, finite.max(initial=0.0) * 1e-3)
        with np.errstate(invalid="ignore"):
            return np.asarray(~((np.abs(a - b) <= near) | (a == b) | (np.isnan(a) & np.isnan(b))))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in "sin cos tan sinh cosh tanh floor ceil cbrt nextafter".split()},
    **{name: getattr(np, "arc" + name[1:]) for name in "asin acos atan asinh acosh atanh".split()},
    **{name: np.vectorize(getattr(math, name), otypes=[float]) for name in "erf erfc lgamma".split()},
    "atan2": np.arctan2, "round": np.rint, "pow": np.float_power, "rem": np.fmod,
}  # fmt: skip
