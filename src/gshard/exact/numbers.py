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
from typing import Any, NamedTuple

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


class Pair(NamedTuple):
    """Residues modulo P, and modulo Q where they are known: -1 elsewhere, None if nowhere."""

    p: Any
    q: Any


class Known(NamedTuple):
    """What is known of the exponential of a number: it is ``exp(rest) c exp(t)``."""

    rest: Pair
    c: np.ndarray  # modulo P
    t: Pair  # a sum of maxima


@dataclasses.dataclass(frozen=True, slots=True)
class Residues:
    """An array of numbers ``v exp(x)``, where v is known modulo P.

    Attributes:
        p: the residues of v modulo P, or symbols.
        q: the residues of v modulo Q, for polynomials and fractions of arguments. ``exp`` maps these to residues modulo
            P, so that ``exp(a + b) = exp(a) exp(b)`` holds. -1 after other functions; None if all are -1.
        x: the exponent x; None if it is 0. x is a sum of maxima (the shift of a softmax).
        known: what is known of the exponential, for sums of maxima, logarithms and others.
        real: the numbers themselves, if they depend on constants and integers only. They decide comparisons.
        has_symbols: whether elements of ``p`` may be symbols.
        degree: a bound of the degree as a polynomial of arguments, of results of functions, and of reciprocals.
        is_positive: whether no number is negative: exponentials, squares, and sums and products of such.
    """

    p: np.ndarray
    q: Any = None
    x: Pair | None = None
    known: Known | None = None
    real: np.ndarray | None = None
    has_symbols: bool = False
    degree: int = 1
    is_positive: bool = False

    @property
    def v(self) -> Pair:
        """The residues of v; 0 for symbols."""
        return Pair(np.where(self.p >= P, 0, self.p) if self.has_symbols else self.p, self.q)

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
            part = (((left >> shift) & ((1 << bits) - 1)).astype(np.float64) @ right).astype(np.int64)
            total += (part % modulus if shift else part) << shift
        total %= modulus
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


def _both(f: Callable[..., Any], *pairs: Pair, ring: Callable[..., Any] | None = None) -> Pair:
    """An operation on residues of both moduli, ``ring(modulus, *residues)``. f is the same operation on floats."""
    ring = ring or (lambda m, *xs: f(*xs) % m)
    p, qs = ring(P, *(x.p for x in pairs)), [x.q for x in pairs if x.q is not None]
    if len(qs) < len(pairs):
        return Pair(p, None)
    q = ring(Q, *qs)
    if any(x.size and x.min() < 0 for x in qs):  # what is unknown spreads as NaN does
        q = np.where(np.isnan(f(*(np.where(x < 0, math.nan, 1.0) for x in qs))), -1, q)
    return Pair(p, q)


def _zero(a: Residues) -> Pair:
    zero = np.zeros((1,) * a.ndim, np.int64)
    return Pair(zero, zero)


def _known(a: Residues) -> Known:
    zero = _zero(a)
    return a.known or Known(a.v, zero.p + 1, zero)


def _of_shape(a: Pair | None, shape: Sequence[int]) -> Pair | None:
    return None if a is None else Pair(*(None if x is None else np.broadcast_to(x, shape) for x in a))


def moved_residues(f: Move, *operands: Residues) -> Residues:
    """Applies a function that only moves elements to all that is known of them."""

    def part(arrays: Sequence[np.ndarray | None]) -> Any:
        if all(x is None for x in arrays):
            return None
        full = (np.int64(-1) if x is None else x for x in arrays)
        return f(*(np.broadcast_to(x, o.shape) for x, o in zip(full, operands, strict=True)))

    def pair(pairs: Sequence[Pair]) -> Pair:
        return Pair(part([x.p for x in pairs]), part([x.q for x in pairs]))

    known = None
    if any(o.known for o in operands):
        rests, factors, maxima = zip(*map(_known, operands), strict=True)
        known = Known(pair(rests), part(factors), pair(maxima))
    return Residues(
        f(*(o.p for o in operands)),
        part([o.q for o in operands]),
        pair([o.x or _zero(o) for o in operands]) if any(o.x for o in operands) else None,
        known,
        None if any(o.real is None for o in operands) else f(*(o.real for o in operands)),
        any(o.has_symbols for o in operands),
        max(o.degree for o in operands),
        all(o.is_positive for o in operands),
    )


def residues_of(x: np.ndarray) -> Residues:
    """Integers, or real numbers that are whole, as residues."""
    real = x.astype(np.float64)
    x = x.astype(np.int64) if x.dtype != np.uint64 else x
    return Residues((x % P).astype(np.int64), (x % Q).astype(np.int64), real=real, degree=0)


class _Domain:
    def __init__(self, draws: int, seed: int, keeps_dtypes: bool = False) -> None:
        self.draws = draws  # how many random numbers stand for each element of an argument
        self.seed = seed
        self.keeps_dtypes = keeps_dtypes  # whether a conversion to a narrower dtype is a function of its own
        self.identities: set[str] = set()  # what is assumed of functions, as text
        self.stand_ins: set[str] = set()  # functions for which another one stands

    def _rng(self, name: str) -> np.random.Generator:
        """The random numbers of a name, the same ones in each call."""
        return np.random.default_rng([self.seed, int(key_of(name)) % 2**32])


class Field(_Domain):
    """Residues modulo P, in which sums and products are exact in every order."""

    def __init__(self, draws: int, seed: int, keeps_dtypes: bool = False) -> None:
        super().__init__(draws, seed, keeps_dtypes)
        self.degree = 1  # the largest degree so far
        self.reciprocals = 0  # how many numbers have been inverted
        self.outcomes: dict[int, int] = {}  # of comparisons of random numbers, by equation: 1 false, 2 true, 3 both

    # --- making numbers

    def random(self, name: str, shape: Sequence[int]) -> Residues:
        """Random numbers for an argument."""
        rng, wanted = self._rng(name), (self.draws, *shape)
        return Residues(rng.integers(1, P, wanted), rng.integers(1, Q, wanted))

    def constant(self, x: np.ndarray, dtype: Any) -> Residues:
        """Numbers that a program contains."""
        real = np.asarray(x, np.float64)
        is_small = np.abs(real) < MASK
        if (~is_small & np.isfinite(real)).any():
            self.identities.add(f"constants of at least {MASK:g} are masks")
        small = np.where(is_small, real, 0.0)
        if 0 < len(np.unique(small)) <= _MOST_FRACTIONS:
            tops, bottoms = simplest(small, dtype)
            p, q = ((tops % m).astype(np.int64) * inverse((bottoms % m).astype(np.int64), m) % m for m in (P, Q))
            return self._of_real(p, q, real, is_small)
        return self._of_real(exact(small, P), exact(small, Q), real, is_small)

    def from_bits(self, x: np.ndarray) -> Residues:
        """Floats whose bits a program has computed."""
        real, is_finite = x.astype(np.float64), np.isfinite(x)
        finite = np.where(is_finite, real, 0.0)
        return self._of_real(exact(finite, P), exact(finite, Q), real, is_finite)

    def _of_real(self, p: np.ndarray, q: np.ndarray, real: np.ndarray, is_ordinary: np.ndarray) -> Residues:
        """Known numbers; what is not ordinary is a symbol."""
        has_symbols = not is_ordinary.all()
        if has_symbols:
            floats = np.where(is_ordinary, 0.0, np.where(np.isfinite(real), np.sign(real) * 1e150, real))
            p = np.where(Reals.is_minus_nan(real), MINUS_NAN, self._with_symbols(p, floats))
        return Residues(p, q, real=real, has_symbols=has_symbols, degree=0, is_positive=bool((real >= 0).all()))

    def to_ints(self, x: Residues, dtype: Any) -> np.ndarray:
        """Floats as integers: the numbers themselves if they are known, else a function of them."""
        if x.real is not None:
            return x.real.astype(dtype)
        return (self._hashed("int", x) % np.uint64(1 << 30)).astype(dtype)

    # --- symbols

    def _as_floats(self, x: Residues) -> np.ndarray:
        """Symbols as floats; other numbers as their signs."""
        where = x.p >= P
        others = np.where(x.p > P // 2, -1.0, np.where(x.p == 0, 0.0, 1.0))
        return np.where(where, _AS_FLOATS[np.where(where, x.p - P, 0)], others)

    def _with_symbols(self, p: np.ndarray, floats: np.ndarray) -> np.ndarray:
        """Residues with symbols where floats are no ordinary numbers."""
        p = np.where(np.abs(floats) < _IS_HUGE, p, np.where(floats > 0, HUGE, MINUS_HUGE))
        p = np.where(np.isposinf(floats), INFINITY, np.where(np.isneginf(floats), MINUS_INFINITY, p))
        return np.where(np.isnan(floats), NAN, p)

    def _apply(
        self, f: Callable[..., Any], *operands: Residues, ring: Callable[..., Any] | None = None, **parts: Any
    ) -> Residues:
        """The result of an operation of rings (``_both``): f of symbols, and of the numbers themselves."""
        p, q = _both(f, *(x.v for x in operands), ring=ring)
        if any(x.has_symbols for x in operands):
            p = self._with_symbols(p, f(*map(self._as_floats, operands)))
            parts["has_symbols"] = bool((p >= P).any())
        real = None if any(x.real is None for x in operands) else f(*(x.real for x in operands))
        parts = {"is_positive": all(x.is_positive for x in operands), **parts}
        return Residues(p, q, real=real, **parts)

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
        found = self._apply(np.multiply, dataclasses.replace(x, q=None), Residues(self._exp_of(x.x)))
        return dataclasses.replace(x, p=found.p, q=None, x=None, known=None, real=None)

    def add(self, a: Residues, b: Residues) -> Residues:
        """a + b."""
        x = known = None
        if a.x is not None or b.x is not None:
            x = self._common(moved_residues(lambda v, w: np.stack(np.broadcast_arrays(v, w)), a, b), (0,))
            a, b = (a, b) if x is not None else (self.flat(a), self.flat(b))
        if (a.known or b.known) and x is None:
            (rest, c, t), (more, d, u) = _known(a), _known(b)
            known = Known(_both(np.add, rest, more), c * d % P, _both(np.add, t, u))
        return self._apply(np.add, a, b, x=x, known=known, degree=max(a.degree, b.degree))

    def neg(self, a: Residues) -> Residues:
        """-a."""
        known = None
        if a.known:
            known = Known(_both(np.negative, a.known.rest), inverse(a.known.c), _both(np.negative, a.known.t))
        return self._apply(np.negative, a, x=a.x, known=known, degree=a.degree, is_positive=False)

    def mul(self, a: Residues, b: Residues) -> Residues:
        """a b."""
        x = a.x if b.x is None else b.x if a.x is None else _both(np.add, a.x, b.x)
        return self._apply(
            np.multiply, a, b,
            x=_of_shape(x, np.broadcast_shapes(a.shape, b.shape)),
            known=self._times(a, b) if a.known else self._times(b, a) if b.known else None,
            degree=self._of_degree(a.degree + b.degree),
            is_positive=a is b or (a.is_positive and b.is_positive),
        )  # fmt: skip

    def _times(self, a: Residues, factor: Residues) -> Known | None:
        """What is known of the exponential of a constant times a."""
        if factor.real is None or factor.x is not None or factor.has_symbols:
            return None
        rest, c, t = _known(a)
        if (c != 1).any():
            numbers = np.unique(factor.real)
            if len(numbers) != 1 or numbers[0] != int(numbers[0]) or abs(numbers[0]) > 64:
                return None
            c = power(c if numbers[0] > 0 else inverse(c), abs(int(numbers[0])))
        return Known(_both(np.multiply, rest, factor.v), c, _both(np.multiply, t, factor.v))

    def reciprocal(self, a: Residues) -> Residues:
        """1 / a."""
        zeros = a.p == 0
        x = None if a.x is None else _both(np.negative, a.x)
        self.reciprocals += 0 if a.real is not None else a.p.size // self.draws
        ring = lambda m, p: inverse(p, m)  # noqa: E731
        found = self._apply(np.reciprocal, a, ring=ring, x=x, degree=min(a.degree, 1))
        if not zeros.any():
            return found
        return dataclasses.replace(found, p=np.where(zeros, INFINITY, found.p), has_symbols=True)

    def power(self, a: Residues, exponent: int) -> Residues:
        """a to a whole power."""
        if exponent < 0:
            return self.power(self.reciprocal(a), -exponent)
        x = None if a.x is None else _both(lambda e: e * exponent, a.x)
        degree, is_positive = self._of_degree(a.degree * exponent), a.is_positive or exponent % 2 == 0
        ring = lambda m, p: power(p, exponent, m)  # noqa: E731
        return self._apply(lambda v: v**exponent, a, ring=ring, x=x, degree=degree, is_positive=is_positive)

    def abs(self, a: Residues) -> Residues:
        """The absolute value of a."""
        return self.mul(a, self.sign(a))

    def sum(self, a: Residues, axes: tuple[int, ...]) -> Residues:
        """The sum over dimensions (lanes are dimension 0)."""
        a, x = self._with_common(a, axes)
        return self._apply(lambda v: v.sum(axes), a, x=x, degree=a.degree)

    def _common(self, a: Residues, axes: tuple[int, ...]) -> Pair | None:
        """The exponents of the sums over dimensions, if all numbers of a sum have the same or are 0."""
        if a.x is None or any(not a.shape[d] for d in axes):
            return None
        counts = a.p != 0
        largest = np.where(counts, a.x.p, -1).max(axes, keepdims=True)
        if (counts & (a.x.p != largest)).any():
            return None
        q = None if a.x.q is None else np.where(counts, a.x.q, -1).max(axes)
        return Pair(np.maximum(largest, 0).squeeze(axes), q)

    def _with_common(self, a: Residues, axes: tuple[int, ...]) -> tuple[Residues, Pair | None]:
        x = self._common(a, axes)
        return (a if x is not None else self.flat(a)), x

    def dot(self, a: Residues, b: Residues) -> Residues:
        """Products of matrices: ``[lanes, batch, m, k] @ [lanes, batch, k, n]``."""
        (a, rows), (b, columns), x = self._with_common(a, (3,)), self._with_common(b, (2,)), None
        if rows is not None or columns is not None:
            left, right = (Pair(*(e if e is None else np.expand_dims(e, at) for e in pair)) if pair else _zero(a)
                           for pair, at in ((rows, 3), (columns, 2)))  # fmt: skip
            x = _of_shape(_both(np.add, left, right), (*a.shape[:3], b.shape[3]))
        degree = self._of_degree(a.degree + b.degree)
        return self._apply(np.matmul, a, b, ring=lambda m, p, q: product(p, q, m), x=x, degree=degree)

    # --- functions

    def _hashed(self, name: str, *operands: Residues | Ints) -> np.ndarray:
        """A number of 64 bits for the elements of all operands at a position."""
        draws = np.arange(1, self.draws + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self.seed)
        keys = np.repeat(_mixed(draws), max(x.shape[0] for x in operands) // self.draws) ^ key_of(name)
        found: Any = keys.reshape(-1, *(1,) * (operands[0].ndim - 1))
        for x in operands:
            bits = self.flat(x).p if isinstance(x, Residues) else x.astype(np.int64)
            found = _mixed((found ^ bits.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        return np.asarray(found)

    def function(self, name: str, *operands: Value, spreads: bool = True) -> Residues:
        """An unknown function: equal operands have equal results. ``spreads``: that of NaN is NaN."""
        p = (self._hashed(name, *operands) % np.uint64(P)).astype(np.int64)
        nan = [self.is_nan(x) for x in operands if spreads and isinstance(x, Residues) and x.has_symbols]
        if nan:
            p = np.where(functools.reduce(np.logical_or, nan), NAN, p)
        return Residues(p, has_symbols=bool(nan))

    def _exp_of(self, a: Pair) -> np.ndarray:
        """Exponentials: squares. Of polynomials they are powers of one base; of x and -x they are inverses."""
        p, q = a
        if q is not None:
            first, second, third = (t[(q >> s) & 1023] for t, s in zip(_powers_of_base(), (0, 10, 20), strict=True))
            found = first * second % P * third % P
            return np.where(q < 0, self._exp_of(Pair(p, None)), found) if (q < 0).any() else found
        is_upper = p > P // 2
        bits = self._hashed("exp", np.where(is_upper, P - p, p))
        found = (bits % np.uint64(P - 1)).astype(np.int64) + 1
        found = found * found % P
        return np.where(is_upper, inverse(found), np.where(p == 0, 1, found))

    def exp(self, a: Residues) -> Residues:
        """exp(a)."""
        a = self.flat(a)
        rest, c, t = _known(a)
        p = np.broadcast_to(self._exp_of(rest) * c % P, a.shape)
        x = _of_shape(t, p.shape) if (t.p != 0).any() else None
        if a.has_symbols:
            floats = np.where(a.p >= P, self._as_floats(a), 0.0)
            grows = np.where(floats > 0, math.inf, floats)
            p = np.where(floats < 0, 0, self._with_symbols(p, grows))
        real = None if a.real is None else np.exp(a.real)
        return Residues(p, x=x, real=real, has_symbols=a.has_symbols and bool((p >= P).any()), is_positive=True)

    def log(self, a: Residues) -> Residues:
        """log(a). The part that is known of the result is all of it."""
        zeros = a.p == 0
        p = (self._hashed("log", Residues(a.p)) % np.uint64(P)).astype(np.int64)
        t = a.x or _zero(a)
        p = (np.where(a.p == 1, 0, p) + t.p) % P
        known = Known(_zero(a), np.where(zeros | (a.p >= P), 1, a.p), t)
        has_symbols = bool(a.has_symbols or zeros.any())
        if has_symbols:
            p = np.where(zeros, MINUS_INFINITY, np.where(a.p >= P, np.where(self.is_nan(a), NAN, INFINITY), p))
        real = None if a.real is None else np.log(a.real)
        return Residues(p, known=known, real=real, has_symbols=has_symbols)

    def sqrt(self, a: Residues) -> Residues:
        """The root of a; of a number that counts as negative the root of -a."""
        x = None if a.x is None else _both(np.positive, a.x, ring=lambda m, e: e * ((m + 1) // 2) % m)
        of_floats = lambda v: np.sqrt(np.where(np.isfinite(v), np.abs(v), v))  # noqa: E731
        root = lambda m, p: power(p, _ROOT)  # noqa: E731
        return self._apply(of_floats, dataclasses.replace(a, q=None), ring=root, x=x, is_positive=True)

    def sign(self, a: Residues) -> Residues:
        """-1, 0 or 1."""
        if a.real is not None:
            return self.constant(np.sign(a.real), np.float64)
        signs = self._signs(a)
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

    def order(self, a: Residues) -> np.ndarray:
        """Integers in the order of the elements; NaN is the largest."""
        if a.real is not None:
            return np.asarray(Reals.order(a.real))
        return np.where(self.is_nan(a), 2**63 - 1, self.rank(a))

    def is_nan(self, a: Residues) -> np.ndarray:
        """Where a is NaN."""
        return (a.p == NAN) | (a.p == MINUS_NAN)

    def is_minus_nan(self, a: Residues) -> np.ndarray:
        """Where a is NaN with a sign, of constants and bits only."""
        return a.p == MINUS_NAN

    def is_finite(self, a: Residues) -> np.ndarray:
        """Where a is neither NaN nor infinite."""
        return (a.p < P) | (a.p == HUGE) | (a.p == MINUS_HUGE)

    def compare(self, f: Any, a: Residues, b: Residues, equation: int = 0) -> np.ndarray:
        """``f(a, b)`` for a comparison of NumPy."""
        nan = self.is_nan(a) | self.is_nan(b)
        if f in (np.equal, np.not_equal):
            return np.where(nan, f is np.not_equal, self.differs(a, b) ^ (f is np.equal))
        found = ~nan & f(*self._pair(a, b))
        self._note(equation, a, b, found)
        return np.asarray(found)

    def extreme(self, f: Any, a: Residues, b: Residues, equation: int = 0) -> Residues:
        """``np.maximum`` or ``np.minimum`` of a and b."""
        left, right = self._pair(a, b)
        takes_left = f(left, right) == left
        self._note(equation, a, b, takes_left)
        takes_left = (takes_left & ~self.is_nan(b)) | self.is_nan(a)
        found = self.as_maximum(moved_residues(lambda x, y: np.where(takes_left, x, y), a, b))
        is_positive = found.is_positive or (f is np.maximum and (a.is_positive or b.is_positive))
        return dataclasses.replace(found, is_positive=is_positive)

    def _note(self, equation: int, a: Residues, b: Residues, found: np.ndarray) -> None:
        """Notes which outcomes a comparison of random numbers has had; those that a constant decides do not count."""
        is_open = not any((x.real is not None and np.isinf(x.real).all()) or x.is_positive for x in (a, b))
        if equation and is_open and found.size and (a.real is None or b.real is None):
            now = 2 * int(found.any()) + int(not found.all())
            self.outcomes[equation] = self.outcomes.get(equation, 0) | now

    def _pair(self, a: Residues, b: Residues) -> tuple[np.ndarray, np.ndarray]:
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
        signs = power(a.v.p, _HALF_P)
        signs = np.where(signs == P - 1, -1, signs)
        return np.where(a.p >= P, np.sign(np.nan_to_num(self._as_floats(a))).astype(np.int64), signs)

    def as_maximum(self, a: Residues) -> Residues:
        """Marks maxima, whose exponentials stay symbols: a softmax does not depend on what is subtracted."""
        a = self.flat(a)
        return dataclasses.replace(a, known=Known(_zero(a), np.ones((1,) * a.ndim, np.int64), a.v))

    from_ints = staticmethod(residues_of)

    def differs(self, a: Value, b: Value) -> np.ndarray:
        """Where two arrays are not equal."""
        if isinstance(a, Residues):
            a, b = self.flat(a), self.flat(b)
            return np.asarray((a.p != b.p) & ~(self.is_nan(a) & self.is_nan(b)))
        return np.asarray(a != b)


class Integers:
    """Integers and booleans."""

    noun = "integers"
    add: Any = staticmethod(lambda a, b: np.logical_or(a, b) if a.dtype == bool else np.add(a, b))
    neg, mul, sign, abs = np.negative, np.multiply, np.sign, np.abs
    power: Any = np.power
    order: Any = staticmethod(lambda a: a if a.dtype == np.uint64 else a.astype(np.int64))
    sum = staticmethod(lambda a, axes: a.sum(axes, a.dtype))
    dot: Any = staticmethod(lambda a, b: np.matmul(a.astype(np.int64), b.astype(np.int64)))
    compare = extreme = staticmethod(lambda f, a, b, equation=0: f(a, b))


INTEGERS = Integers()


class Reals(_Domain, Integers):
    """Numbers of float64. A difference of residues is a difference if these differ, too."""

    def random(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """Random numbers for an argument."""
        return self._rng(name).standard_normal((self.draws, *shape))

    def constant(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        """Numbers that a program contains."""
        tops: Any = np.asarray(x, np.float64)
        bottoms: Any = 1.0
        if x.size and np.isfinite(x).all() and len(np.unique(x)) <= _MOST_FRACTIONS and np.abs(x).max() < MASK:
            tops, bottoms = (n.astype(np.float64) for n in simplest(tops, dtype))
        return tops / bottoms

    from_ints = from_bits = staticmethod(lambda x: np.asarray(x, np.float64))
    order = staticmethod(lambda x: np.unique(x, return_inverse=True)[1].reshape(x.shape))
    is_nan, is_finite = np.isnan, np.isfinite
    is_minus_nan = staticmethod(lambda x: np.isnan(x) & np.signbit(x))
    add, dot, power, exp, log, sqrt = np.add, np.matmul, np.float_power, np.exp, np.log, np.sqrt
    reciprocal = np.reciprocal
    sum = staticmethod(lambda a, axes: np.add.reduce(a, axes, initial=-0.0))  # keeps the sign of zeros

    def to_ints(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        """Floats as integers."""
        return x.astype(dtype)

    def narrowed(self, a: np.ndarray, dtype: Any) -> np.ndarray:
        """The conversion to a dtype."""
        return a

    def function(self, name: str, *operands: np.ndarray, spreads: bool = True) -> np.ndarray:
        """A function of NumPy or SciPy; any fixed one where they have none."""
        f = _FUNCTIONS.get(name)
        if f is None:
            self.stand_ins.add(name)
            f = lambda *xs: np.sin(sum((i + 1.3) * np.asarray(x, np.float64) for i, x in enumerate(xs)))  # noqa: E731
        return np.asarray(f(*operands), np.float64)

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
