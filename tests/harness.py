"""One table of small programs, each around one equation: a new rule is a new row here.

Sizes are uneven on purpose (7, 5, 10, 3 over 2, 3 and 6 parts), some smaller than the number of parts; data varies in
sign and is never all equal. Indices reach out of range on both sides.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas

from gshard.api.attention_function import attention
from gshard.api.kernel_function import kernel as gshard_kernel
from gshard.api.row_functions import put_rows, take_rows
from gshard.tracing.trace import trace

# Compiler options that disable XLA's algebraic simplifier, so that XLA runs a program unchanged.
AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One case.

    Attributes:
        name: unique; begins with the primitive's name.
        primitive: the equation that is split.
        function: the program around it.
        arguments: its arrays.
    """

    name: str
    primitive: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    @functools.cached_property
    def program(self):
        """Its equations; all tests share them, since tracing costs more than most of what is done with them."""
        return trace(self.function, *self.arguments)

    @functools.cached_property
    def expected(self):
        """Its results, compiled without XLA's algebraic simplifier."""
        found = jax.jit(self.function, compiler_options=AS_WRITTEN)(*self.arguments)
        return [np.asarray(x) for x in jax.tree.leaves(found)]


def normal(*shape, seed=0):
    """Numbers that vary in sign."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def whole(*shape, low=-9, high=9):
    """Integers that vary in sign."""
    return np.random.default_rng([*shape, 5]).integers(low, high, shape).astype(np.int32)


X = normal(7, 10)
Y = normal(7, 10, seed=1)
P = np.abs(X) + 0.1
N = whole(7, 10)
IMAGE = normal(2, 4, 11, 9)
MATRICES = normal(3, 4, 4)
POSITIVE_DEFINITE = MATRICES @ MATRICES.transpose(0, 2, 1) + 4 * np.eye(4, dtype=np.float32)


@functools.cache
def rows():
    """All rows."""
    families = (elementwise, contractions, reductions, shapes, windows, look_ups, sliding, ordered, others)
    families = (*families, small, narrow, partial_windows, grouped)
    return tuple(itertools.chain.from_iterable(family() for family in families))


def kernel(x, scale):
    """Running sums down the rows of blocks, each row scaled: blocks talk through the grid's order."""

    def body(x, scale, total, rows):
        @pallas.when(pallas.program_id(0) == 0)
        def begin():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...][0]
        rows[...] = x[...] * scale[...] + pallas.program_id(0)

    (n, m), row = x.shape, pallas.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    whole = pallas.BlockSpec((m,), lambda i: (0,))
    out = jax.ShapeDtypeStruct((m,), x.dtype), jax.ShapeDtypeStruct((n, m), x.dtype)
    call = pallas.pallas_call(body, out, grid=(n,), in_specs=[row, whole], out_specs=(whole, row), interpret=True)
    return call(x, scale)


def row(name, function, *arguments):
    """A row whose primitive is the first word of its name."""
    return Row(name, name.split(",")[0], function, arguments)


def elementwise():
    unary = {
        "abs": X, "acos": X / 9, "acosh": P + 1, "asin": X / 9, "asinh": X, "atan": X, "atanh": X / 9, "bessel_i0e": X,
        "bessel_i1e": X, "cbrt": X, "ceil": X, "cos": X, "cosh": X, "digamma": P, "erf": X, "erf_inv": X / 9, "erfc": X,
        "exp": X, "exp2": X, "expm1": X, "floor": X, "is_finite": X, "lgamma": P, "log": P, "log1p": P, "logistic": X,
        "neg": X, "not": N, "population_count": N, "round": X, "rsqrt": P, "sign": X, "sin": X, "sinh": X,
        "sqrt": P, "tan": X, "tanh": X, "clz": N,
    }  # fmt: skip
    for name, x in unary.items():
        yield row(name, getattr(lax, {"not": "bitwise_not"}.get(name, name)), x)
    complexes = X + 1j * Y
    for name, call in {"real": lax.real, "imag": lax.imag, "conj": lax.conj}.items():
        yield row(name, call, complexes)
    yield row("integer_pow", lambda x: lax.integer_pow(x, 3), X)
    yield row("integer_pow, integers", lambda x: lax.integer_pow(x, 2), N)
    yield row("square", lax.square, X)
    for number in (-1.5, -0.0, 0.0, 1.5):
        yield row(f"max, {number}", lambda x, c=number: lax.max(x, c), X)
        yield row(f"min, {number}", lambda x, c=number: lax.min(x, c), X)
    yield row("copy", lambda x: jnp.array(x, copy=True), X)
    yield row("convert_element_type", lambda x: lax.convert_element_type(x, jnp.bfloat16), X)
    yield row("reduce_precision", lambda x: lax.reduce_precision(x, 5, 4), X)
    yield row("stop_gradient", lax.stop_gradient, X)
    binary = {
        "add": (X, Y), "sub": (X, Y), "mul": (X, Y), "div": (X, P), "max": (X, Y), "min": (X, Y), "atan2": (X, Y),
        "pow": (P, X), "rem": (X, Y), "nextafter": (X, Y), "eq": (N, N[::-1].copy()),
        "ne": (N, N[::-1].copy()), "ge": (X, Y), "gt": (X, Y), "le": (X, Y), "lt": (X, Y), "and": (N, N[::-1].copy()),
        "or": (N, N[::-1].copy()),
        "xor": (N, N[::-1].copy()), "shift_left": (N, np.abs(N)), "shift_right_logical": (N, np.abs(N)),
        "shift_right_arithmetic": (N, np.abs(N)), "complex": (X, Y), "igamma": (P, P[::-1].copy()),
        "igammac": (P, P[::-1].copy()), "zeta": (P + 1, P),
    }  # fmt: skip
    names = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
    for name, both in binary.items():
        yield row(name, getattr(lax, names.get(name, name)), *both)
    yield row("mul, by less", lambda x: x * 0.3, X)
    yield row("div, by more", lambda x: x / 7.0, X)
    yield row("mul, integers", lambda x, y: x * y, N, N[::-1].copy())
    yield row("dot_general, integers", lambda x, y: x @ y.T, N, N[::-1].copy())
    yield row("mul, size 1 stretched", lambda x, y: lax.mul_p.bind(x, y), X, X[:1])
    yield row("clamp, scalars", lambda x: lax.clamp(-0.5, x, 0.5), X)
    yield row("select_n, scalar predicate", lambda p, x, y: lax.select_n(p, x, y), np.bool_(True), X, Y)
    yield row("select_n", lambda x, y: lax.select_n(x > 0, x, y), X, Y)
    yield row("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), X, normal(5, 3))


def contractions():
    for name, spec, shapes_ in (
        ("dot_general, matrix", "ij,jk->ik", ((7, 10), (10, 5))),
        ("dot_general, batch", "bij,bjk->bik", ((3, 5, 7), (3, 7, 4))),
        ("dot_general, two sums", "ijk,kjl->il", ((5, 3, 7), (7, 3, 4))),
        ("dot_general, outer", "i,j->ij", ((7,), (5,))),
        ("dot_general, tokens to experts", "gsec,gsm->egcm", ((3, 5, 4, 2), (3, 5, 6))),
    ):
        arguments = tuple(normal(*s) for s in shapes_)
        yield row(name, lambda x, y, spec=spec: jnp.einsum(spec, x, y), *arguments)
    yield row("dot_general, integers", lambda x, y: x @ y, N, N.T.copy())
    logical = lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ())))  # noqa: E731
    yield row("dot_general, booleans", logical, X > 1, Y > 1)
    counted = lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=np.int32)  # noqa: E731
    yield row("dot_general, booleans counted", counted, X > 0, Y > 0)


def reductions():
    for name, call, x in (
        ("reduce_sum", lambda x: jnp.sum(x, 0), X), ("reduce_max", lambda x: jnp.max(x, 1), X),
        ("reduce_min", lambda x: jnp.min(x, (0, 1)), X), ("reduce_prod", lambda x: jnp.prod(x, 1), X),
        ("reduce_and", lambda x: jnp.all(x, 0), X > -1), ("reduce_or", lambda x: jnp.any(x, 0), X > 1.5),
        ("reduce_xor", lambda x: jnp.bitwise_xor.reduce(x, 1), N), ("reduce_sum, integers", lambda x: jnp.sum(x, 1), N),
        ("reduce_and, bits", lambda x: jnp.bitwise_and.reduce(x, 0), N),
        ("reduce_max, all negative", lambda x: jnp.max(x, 0), -P), ("reduce_max, integers", lambda x: jnp.max(x, 1), N),
    ):  # fmt: skip
        yield row(name, call, x)
    yield from any_reductions()
    with_nan = np.round(X)
    with_nan[2, 3] = np.nan
    for name in ("argmax", "argmin"):
        for kind, x in (("ties", np.round(X)), ("nan", with_nan), ("one sign", -P if name == "argmax" else P)):
            yield row(f"{name}, {kind}", lambda x, name=name: getattr(lax, name)(x, 1, np.int32), x)
        yield row(f"{name}, first dimension", lambda x, name=name: getattr(lax, name)(x, 0, np.int32), X > 0)
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        for reverse in (False, True):
            call = lambda x, name=name, reverse=reverse: getattr(lax, name)(x, axis=1, reverse=reverse)  # noqa: E731
            yield row(f"{name}, {'backwards' if reverse else 'forwards'}", call, X)
    yield row("cumsum, integers", lambda x: lax.cumsum(x, axis=0), N)


def any_reductions():
    """By computations that JAX has no primitive for, from values that are no identities."""
    by = {"add": (lax.add, 3.0), "max": (lax.max, 0.25), "min": (jnp.minimum, 0.25), "mul": (lax.mul, -2.0)}
    for name, (computation, init) in by.items():
        reduce = lambda x, f=computation, init=init: lax.reduce(x, np.float32(init), f, (1,))  # noqa: E731
        yield row(f"reduce, {name}", reduce, X)
        both = lambda x, f=computation, init=init: lax.reduce(x, np.float32(init), f, (0, 1))  # noqa: E731
        yield row(f"reduce, {name} of everything", both, X)
    yield row("reduce, given", lambda x, init: lax.reduce(x, init, lax.add, (0,)), N, np.int32(40))
    for name, f in (("and", lax.bitwise_and), ("or", lax.bitwise_or), ("xor", lax.bitwise_xor)):
        yield row(f"reduce, bits {name}", lambda x, f=f: lax.reduce(x, np.int32(12), f, (1,)), N)
    yield row("reduce, booleans", lambda x: lax.reduce(x, True, lax.bitwise_xor, (0,)), X > 0)
    norm = lambda x, y: jnp.sqrt(x * x + y * y)  # noqa: E731
    yield row("reduce, norm", lambda x: lax.reduce(x, np.float32(2), norm, (1,)), X)
    yield row("reduce, norm of everything", lambda x: lax.reduce(x, np.float32(2), norm, (0, 1)), X)

    def extremes(x, y):
        return lax.min(x[0], y[0]), lax.max(x[1], y[1]), x[2] + y[2] + 1

    of_three = lambda x, n: lax.reduce((x, x, n), (np.float32(0.5), np.float32(-9), np.int32(7)), extremes, (0,))  # noqa: E731
    yield row("reduce, three at once", of_three, X, N)
    yield row("reduce, three at once of few", of_three, X[:3], N[:3])
    yield row("reduce, three at once of none", of_three, X[:0], N[:0])
    last = lambda x: lax.reduce((x, x), (np.float32(0), np.float32(1)), lambda a, b: (a[0], b[1]), (1,))  # noqa: E731
    yield row("reduce, the last", last, X)


def shapes():
    yield row("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (7, 3, 10), (0, 2)), X)
    yield row("broadcast_in_dim, stretched", lambda x: lax.broadcast_in_dim(x, (7, 6), (0, 1)), X[:, :1])
    yield row("transpose", lambda x: jnp.transpose(x, (2, 0, 1)), normal(3, 5, 7))
    yield row("squeeze", lambda x: lax.squeeze(x, (1,)), normal(7, 1, 10))
    for a, b in (((6, 4), (24,)), ((24,), (4, 6)), ((6, 4), (4, 6)), ((8, 1, 3), (2, 4, 3)), ((12, 5), (3, 4, 5, 1)),
                 ((4, 9), (9, 4)), ((7, 10), (10, 7)), ((3, 4, 5), (4, 15)), ((2, 5, 6, 7), (2, 6, 5, 7)),
                 ((5, 2, 3, 9, 4), (2, 5, 3, 4, 9)), ((11, 2), (2, 11)), ((2, 11), (11, 1, 2))):  # fmt: skip
        yield row(f"reshape, {a} to {b}", lambda x, b=b: x.reshape(b), normal(*a))
    permuted = lambda x: lax.reshape_p.bind(x, new_sizes=(15, 4), dimensions=(2, 0, 1), sharding=None)  # noqa: E731
    yield row("reshape, in another order", permuted, normal(3, 4, 5))
    yield row("reshape, in another order and out of step", lambda x: lax.reshape(x, (9, 4), (1, 0)), normal(9, 4))
    yield row("reshape, booleans", lambda x: x.reshape(10, 7), X > 0)
    yield row("split", lambda x: lax.split(x, (4, 6), 1), X)
    yield row("stack", lambda x, y: jnp.stack([x, y], 1), X, Y)
    yield row("unstack", lambda x: list(jnp.unstack(x, axis=0)), X)
    yield row("tile", lambda x: jnp.tile(x, (3, 2)), X)
    yield row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), X)
    yield row("bitcast_convert_type, narrower", lambda x: lax.bitcast_convert_type(x, jnp.int8), X)
    yield row("gshard_mark", lambda x: jax.tree.map(lambda y: y, _marked(x)), X)


def _marked(x):
    from gshard import replicate

    return replicate(x)


def windows():
    yield row("slice", lambda x: lax.slice(x, (1, 2), (6, 9)), X)
    yield row("slice, strided", lambda x: lax.slice(x, (0, 1), (7, 10), (2, 3)), X)
    yield row("slice, one column", lambda x: x[:, 4:5], X)
    for name, config in (
        ("pad", ((1, 2, 0), (0, 0, 0))), ("pad, negative", ((-1, -2, 0), (3, -4, 0))),
        ("pad, interior", ((1, 2, 2), (0, 3, 1))), ("pad, both", ((-2, -3, 1), (5, 0, 0))),
    ):  # fmt: skip
        yield row(name, lambda x, config=config: lax.pad(x, 2.5, config), X)
    yield row("pad, of nothing", lambda x: lax.pad(x[:0], 2.5, ((3, 4, 0), (0, 2, 0))), X)
    yield row("pad, of all that was cut off", lambda x: lax.pad(x, 2.5, ((-7, 4, 0), (0, 0, 0))), X)
    yield row("rev", lambda x: lax.rev(x, (0, 1)), X)
    yield row("concatenate", lambda x, y: lax.concatenate([x, y, x], 0), X, normal(2, 10))
    yield row("concatenate_slices, rotated", lambda x: jnp.roll(x, 3, 0), X)
    yield row("concatenate_slices, wrapped", lambda x: jnp.concatenate([x[:, -2:], x, x[:, :1]][0:3:2], 1), X)
    # What is left over when a rotation is differentiated.
    edges = lambda low, high: ((low, high, 0), (0, 0, 0))  # noqa: E731
    filled = lambda x: lax.pad(x[3:], 0.0, edges(0, 3)) + lax.pad(x[:3], 0.0, edges(4, 0))  # noqa: E731
    yield row("concatenate_slices, filled up", filled, normal(7, 10))
    numbers = lambda x: jnp.concatenate([jnp.full((2, 10), 2.5), x[3:5], jnp.zeros((1, 10)), x[1:]])  # noqa: E731
    yield row("concatenate_slices, with numbers", numbers, X)
    yield row("concatenate_slices, with a number", lambda x, y: jnp.concatenate([jnp.full((7, 3), y), x[:, 4:]], 1), X,
              np.float32(-0.0))  # fmt: skip
    yield row("slice, one element", lambda x: x[4:5, 7:8], normal(7, 10))
    yield row("slice, far away", lambda x: x[:, 7:], normal(7, 10))
    yield row("concatenate_slices, of two", lambda x, y: jnp.concatenate([y[1:3], x[2:6], x[6:]]), X, normal(4, 10))
    yield row("concatenate, with nothing", lambda x, y: lax.concatenate([x, y], 1), X, normal(7, 0))
    for start in (-3, 0, 4, 20):
        at = np.int32(start)
        ds = lambda x, i: lax.dynamic_slice_p.bind(x, i, i, slice_sizes=(3, 10))  # noqa: E731
        yield row(f"dynamic_slice, at {start}", ds, X, at)
        yield row(f"dynamic_update_slice, at {start}", lambda x, u, i: lax.dynamic_update_slice_p.bind(x, u, i, i),
                  X, normal(3, 4), at)  # fmt: skip
    yield row("dynamic_slice, booleans", lambda x, i: lax.dynamic_slice(x, (i, i), (3, 4)), X > 0, np.int32(1))


def look_ups():
    numbers = lax.GatherDimensionNumbers
    index = np.array([[3], [0], [6], [9], [-2]], np.int32)
    pairs = np.array([[3, 4], [0, 11], [9, 2], [-1, 3], [6, 9], [2, 2]], np.int32)
    for mode in ("clip", "fill", "promise_in_bounds"):
        rows_of = lambda x, i, mode=mode: lax.gather(x, i, numbers((1,), (0,), (0,)), (1, 10), mode=mode)  # noqa: E731
        yield row(f"gather, rows, {mode}", rows_of, X, index)
        yield row(f"gather, booleans, {mode}", rows_of, X > 0, index)
        yield row(f"gather, unsigned, {mode}", rows_of, X, index.astype(np.uint8))
        single = numbers((), (0, 1), (0, 1))
        elements = lambda x, i, single=single, mode=mode: lax.gather(x, i, single, (1, 1), mode=mode)  # noqa: E731
        yield row(f"gather, elements, {mode}", elements, X, pairs)
    several = numbers((1, 2), (), (0,))
    yield row("gather, windows", lambda x, i: lax.gather(x, i, several, (3, 10), mode="clip"), X, index)
    yield row("gather, batches", lambda x, i: jnp.take_along_axis(x, i, 1), X, whole(7, 3, low=0, high=10))
    some, others_ = np.array([3, 0, 9, 3, -12], np.int32), np.array([1, 2, 3, 10, -20], np.int32)
    distinct = np.array([3, 0, 9, 5, 4], np.int32)
    verbs = {"add": "add", "mul": "multiply", "min": "min", "max": "max", "": "set"}
    for name, verb in ((f"scatter-{k}" if k else "scatter", v) for k, v in verbs.items()):
        at = distinct if verb == "set" else some
        for mode in ("drop", "clip"):
            rows_at = lambda a, i, u, verb=verb, mode=mode: getattr(a.at[i], verb)(u, mode=mode)  # noqa: E731
            yield row(f"{name}, rows, {mode}", rows_at, X, at, normal(5, 10))
            points = lambda a, i, j, u, verb=verb, mode=mode: getattr(a.at[i, j], verb)(u, mode=mode)  # noqa: E731
            yield row(f"{name}, elements, {mode}", points, X, some, others_, normal(5))
    yield row("scatter, one out of range", lambda a, u: a.at[12].set(u, mode="drop"), normal(9), np.float32(5))
    yield row("scatter-add, batches", jax.vmap(lambda a, i, u: a.at[i].add(u)), normal(5, 6, 3),
              whole(5, 4, low=0, high=6), normal(5, 4, 3))  # fmt: skip


def sliding():
    def conv(**settings):
        return lambda x, k: lax.conv_general_dilated(x, k, **settings)

    for stride, padding, base, dilation in (
        ((1, 1), "SAME", (1, 1), (1, 1)), ((2, 2), "SAME", (1, 1), (1, 1)), ((1, 3), [(2, 0), (-1, 3)], (1, 1), (2, 1)),
        ((1, 1), [(1, 2), (3, 1)], (2, 3), (1, 1)), ((2, 1), [(1, 2), (0, 1)], (3, 2), (1, 2)),
        ((1, 1), "VALID", (1, 1), (3, 2)),
    ):  # fmt: skip
        settings = {"window_strides": stride, "padding": padding, "lhs_dilation": base, "rhs_dilation": dilation}
        yield row(f"conv_general_dilated, {stride} {padding} {base} {dilation}", conv(**settings), IMAGE,
                  normal(6, 4, 3, 3))  # fmt: skip
    same = {"window_strides": (1, 1), "padding": "SAME"}
    for name, image, kernel, groups in (
        ("feature groups", IMAGE, normal(6, 2, 3, 3), {"feature_group_count": 2}),
        ("depthwise", IMAGE, normal(4, 1, 3, 3), {"feature_group_count": 4}),
        ("batch groups", normal(4, 3, 5, 5), normal(6, 3, 3, 3), {"batch_group_count": 2}),
    ):
        yield row(f"conv_general_dilated, {name}", conv(**same, **groups), image, kernel)
    for n, (stride, padding, base, dilation) in enumerate((
        ((1, 1), [(1, 1), (1, 1)], (1, 1), (1, 1)), ((1, 2), [(1, 2), (0, 3)], (2, 1), (1, 1)),
        ((2, 1), [(3, 2), (6, 5)], (1, 2), (2, 1)),
    )):  # fmt: skip
        settings = {"window_strides": stride, "padding": padding, "lhs_dilation": base, "rhs_dilation": dilation}
        yield row(f"conv_general_dilated, kernel longer than the result {n}", conv(**settings), normal(3, 4, 7, 10),
                  normal(6, 4, 5, 9))  # fmt: skip
    nothing = {"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 3)}
    yield row("conv_general_dilated, kernel too long for any result", conv(**nothing), normal(2, 3, 9, 10),
              normal(3, 3, 4, 5))  # fmt: skip
    for name, start, monoid in (("sum", 0.0, lax.add), ("max", -np.inf, lax.max), ("min", np.inf, lax.min)):
        pool = lambda x, start=start, monoid=monoid: lax.reduce_window(  # noqa: E731
            x, np.float32(start), monoid, (1, 1, 3, 2), (1, 1, 2, 1), "SAME")  # fmt: skip
        yield row(f"reduce_window_{name}", pool, IMAGE)
        spread = lambda x, start=start, monoid=monoid: lax.reduce_window(  # noqa: E731
            x, np.float32(start), monoid, (1, 1, 3, 2), (1, 1, 1, 2), ((0, 0), (0, 0), (2, 1), (0, 3)), (1, 1, 2, 1),
            (1, 1, 1, 3))  # fmt: skip
        yield row(f"reduce_window_{name}, dilated", spread, IMAGE)
    yield from any_windows()
    yield from selected()


def any_windows():
    """Windows folded by computations that JAX has no primitive for, from values that are no identities."""
    settings = {
        "same": ((1, 1, 3, 2), (1, 1, 2, 1), "SAME"),
        "dilated": ((1, 1, 3, 2), (1, 1, 1, 2), ((0, 0), (0, 0), (2, 1), (0, 3)), (1, 1, 2, 1), (1, 1, 1, 3)),
        "apart": ((1, 1, 2, 2), (1, 1, 3, 4), ((0, 0), (0, 0), (-1, 2), (4, 0)), (1, 1, 1, 2)),
    }

    def spread(x, y):
        return lax.min(x[0], y[0]), lax.max(x[1], y[1]), x[2] + y[2]

    inits = (np.float32(0.5), np.float32(-9), np.int32(2))
    for name, setting in settings.items():
        product = lambda x, setting=setting: lax.reduce_window(x, np.float32(1), lax.mul, *setting)  # noqa: E731
        yield row(f"reduce_window, product, {name}", product, IMAGE)
        more = lambda x, setting=setting: lax.reduce_window(x, np.float32(3), lax.add, *setting)  # noqa: E731
        yield row(f"reduce_window, from three, {name}", more, IMAGE)
        norm = lambda x, setting=setting: lax.reduce_window(  # noqa: E731
            x, np.float32(2), lambda a, b: jnp.sqrt(a * a + b * b), *setting)  # fmt: skip
        yield row(f"reduce_window, norm, {name}", norm, IMAGE)
        three = lambda x, n, setting=setting: lax.reduce_window((x, x, n), inits, spread, *setting)  # noqa: E731
        yield row(f"reduce_window, three at once, {name}", three, IMAGE, whole(*IMAGE.shape))
    pair = lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]))  # noqa: E731
    few = lambda x: lax.reduce_window((x, x), inits[:2], pair, (2, 3), (1, 1), ((3, 0), (1, 1)))  # noqa: E731
    yield row("reduce_window, few", few, X[:3, :4])
    none = lambda x: lax.reduce_window(x, np.int32(3), lax.add, (5, 1), (1, 1), "VALID")  # noqa: E731
    yield row("reduce_window, no window", none, N[:3])
    bits = lambda x: lax.reduce_window(x, np.int32(0), lax.bitwise_xor, (3, 2), (2, 1), "SAME")  # noqa: E731
    yield row("reduce_window, bits", bits, N)


def selected():
    """Gradients of pooling: ties go to the first element of a window, padding is never better than an element."""
    ties = np.round(IMAGE[:, 0])
    lowest = np.where(ties > 1, ties, -np.inf).astype(np.float32)
    settings = {
        "stride 1": ((1, 3, 2), (1, 1, 1), "SAME"), "stride 1, valid": ((1, 4, 3), (1, 1, 1), "VALID"),
        "as far as large": ((1, 2, 3), (1, 2, 3), "VALID"), "overlapping": ((1, 3, 4), (1, 2, 3), "SAME"),
        "apart": ((1, 1, 2), (1, 2, 5), "VALID"), "far apart": ((1, 2, 1), (1, 5, 4), ((0, 0), (1, 3), (2, 0))),
        "larger than a part": ((1, 9, 8), (1, 2, 1), ((0, 0), (4, 7), (0, 5))),
    }  # fmt: skip
    cases = [(name, setting, ties, -np.inf, lax.max) for name, setting in settings.items()]
    cases += [("least", settings["overlapping"], ties, np.inf, lax.min)]
    cases += [("of nothing", settings["overlapping"], lowest, -np.inf, lax.max)]
    for name, (window, strides, padding), x, init, monoid in cases:
        pool = lambda x, w=window, s=strides, p=padding, i=init, m=monoid: lax.reduce_window(x, i, m, w, s, p)  # noqa: E731
        weights = np.round(8 * normal(*jax.eval_shape(pool, x).shape))  # sums are exact, whatever their order
        yield row(f"select_and_scatter_add, {name}", lambda x, g, pool=pool: jax.vjp(pool, x)[1](g), x, weights)
        yield row(f"select_and_gather_add, {name}", lambda x, t, pool=pool: jax.jvp(pool, (x,), (t,)), x,
                  normal(*x.shape))  # fmt: skip
    pool = lambda x: lax.reduce_window(x, -np.inf, lax.max, (3, 2), (2, 1), "SAME")  # noqa: E731
    for name, x in (("few", X[:3, :4]), ("one", X[:1, :1]), ("none", X[:0]), ("with NaN", np.where(X > 1, np.nan, X))):
        weights = normal(*jax.eval_shape(pool, x).shape)
        yield row(f"select_and_scatter_add, {name}", lambda x, g: jax.vjp(pool, x)[1](g), x, weights)
        if x.size:
            yield row(f"select_and_gather_add, {name}", lambda x, t: jax.jvp(pool, (x,), (t,)), x, normal(*x.shape))
    for name, window, base, dilation in (("dilated", (3, 2), (1, 1), (2, 3)), ("spread", (1, 4), (1, 2), (1, 1))):
        wide = lambda x, w=window, b=base, d=dilation: lax.reduce_window(  # noqa: E731
            x, -np.inf, lax.max, w, (1, 1), "VALID", b, d)  # fmt: skip
        forwards = lambda x, t, pool=wide: jax.jvp(pool, (x,), (t,))  # noqa: E731
        yield row(f"select_and_gather_add, {name}", forwards, np.round(X), Y)
    yield row("select_and_scatter_add, bfloat16", lambda x, g: jax.vjp(pool, x)[1](g), X.astype(jnp.bfloat16),
              normal(4, 10).astype(jnp.bfloat16))  # fmt: skip


def ordered():
    """Sorting: few elements are gathered, many dealt out in columns, and with other dimensions the cut moves there."""
    long = np.round(normal(1000) * 20) / 4
    long[[0, 3, 500, 998]] = np.nan, -np.nan, np.inf, -np.inf
    long[[7, 400, 401, 900]] = -0.0, 0.0, -0.0, 0.0
    whole_numbers = whole(1000, low=-50, high=50)
    place = np.arange(1000, dtype=np.int32)
    yield row("sort, two operands", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), X, Y)
    yield row("sort, long", lambda x: lax.sort(x), long)
    yield row("sort, arguments", lambda x, i: lax.sort((x, i), num_keys=1), long, place)
    yield row("sort, long integers", lambda x: lax.sort(x), whole_numbers)
    yield row("sort, two keys", lambda x, y, z: lax.sort((x, y, z), num_keys=2), whole_numbers % 7, whole_numbers,
              long)  # fmt: skip
    others_ = place - 99, place.astype(np.uint8), long > 0, long.astype(jnp.bfloat16)
    yield row("sort, beside all types", lambda *xs: lax.sort(xs, num_keys=1), long, *others_)
    yield row("sort, two keys of integers", lambda x, y: lax.sort((x, y), num_keys=2), whole_numbers % 7, place[::-1])
    yield row("sort, booleans and places", lambda x, i: lax.sort((x, i), num_keys=1), whole_numbers > 40, place)
    yield row("sort, columns of little else", lambda x, i: lax.sort((x, i), dimension=0, num_keys=1),
              np.stack([long, -long], 1), np.stack([place, place], 1))  # fmt: skip
    yield row("sort, many beside it", lambda x: lax.sort(x, dimension=1), np.round(normal(5, 20, 7)))
    yield row("sort, greatest integers", lambda x: lax.sort(x), np.clip(whole(40), -1, 5).astype(np.uint8))
    yield row("sort, booleans", lambda x: lax.sort(x, dimension=0), X > 0)
    yield row("sort, complex", lambda x: lax.sort(x, dimension=1), np.round(X) + 1j * np.round(Y))
    yield row("sort, one", lambda x, y: lax.sort((x, y), dimension=0), normal(1, 5), normal(1, 5, seed=2))
    yield row("sort, nothing", lambda x: lax.sort(x, dimension=1), normal(5, 0))
    yield row("sort, beside nothing", lambda x: lax.sort(x, dimension=1), normal(0, 5))
    for k in (1, 3, 5):
        yield row(f"top_k, {k}", lambda x, k=k: lax.top_k(x, k), np.round(X))
    yield row("top_k, negative integers", lambda x: lax.top_k(x, 2), -np.abs(N) - 1)
    lowest = np.where(X > 1, X, -np.inf).astype(np.float32)
    for k in (1, 3, 7):
        yield row(f"approx_top_k, {k}", lambda x, k=k: lax.approx_max_k(x, k), X)
        yield row(f"approx_top_k, {k} least", lambda x, k=k: lax.approx_min_k(x, k, reduction_dimension=0), X)
    yield row("approx_top_k, values of ties", lambda x: lax.approx_max_k(x, 4)[0], np.round(normal(5, 12)))
    yield row("approx_top_k, values of infinities", lambda x: lax.approx_max_k(x, 6)[0], lowest)
    yield row("approx_top_k, few", lambda x: lax.approx_max_k(x, 2, reduction_dimension=0), X[:2])
    yield row("approx_top_k, beside nothing", lambda x: lax.approx_max_k(x, 2), X[:0])
    yield row("approx_top_k, bfloat16", lambda x: lax.approx_min_k(x, 3), X.astype(jnp.bfloat16))
    more = lambda x: lax.approx_max_k(x, 3, aggregate_to_topk=False)  # noqa: E731
    yield row("approx_top_k, not brought together", more, X)


def others():
    yield row("fft", jnp.fft.fft, X)
    yield row("cholesky", lax.linalg.cholesky, POSITIVE_DEFINITE)
    yield row("qr", lambda x: jnp.abs(jnp.linalg.qr(x)[1]), MATRICES)
    yield row("ormqr", lambda a, t: lax.linalg.ormqr(a, t, a), MATRICES, normal(*MATRICES.shape[:-2], 3))
    yield row("eigh", lambda x: jnp.linalg.eigvalsh(x), POSITIVE_DEFINITE)
    yield row("svd", lambda x: jnp.linalg.svd(x, compute_uv=False), MATRICES)
    yield row("lu", lambda x: lax.linalg.lu(x), MATRICES)
    for left in (True, False):
        solve = lambda a, b, left=left: lax.linalg.triangular_solve(a, b, left_side=left, lower=True)  # noqa: E731
        yield row(f"triangular_solve, {left}", solve, POSITIVE_DEFINITE, normal(3, 4, 4, seed=2))
    yield row("iota", lambda: lax.broadcasted_iota(jnp.int32, (7, 10), 1))
    yield row("iota, floats", lambda: lax.broadcasted_iota(jnp.float32, (7, 10), 0))
    yield row("empty", lambda: lax.empty((7, 10), jnp.float32))  # on CPU it is zeros
    yield row("iota_2x32_shape", lambda k: jax.random.bits(k, (7, 10)), jax.random.key(3))
    yield row("threefry2x32", lambda k: jax.random.bits(k, (7, 10)), jax.random.key(4))
    yield row("random_unwrap", lambda k: jax.random.key_data(k), jax.random.split(jax.random.key(0), 5))
    yield row("random_wrap", lambda x: jax.random.bits(jax.random.wrap_key_data(x), (3,)),
              np.array([7, 9], np.uint32))  # fmt: skip
    folded = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))
    yield row("random_fold_in", lambda i: jax.random.key_data(folded(i)), np.arange(5))
    yield row("random_split", lambda k: jax.random.key_data(jax.random.split(k, 3)), jax.random.key(1))
    yield row("random_seed", lambda i: jax.random.key_data(jax.vmap(jax.random.key)(i)), np.arange(5))


def small():
    """Fewer elements than devices, one, and none: most parts are empty."""
    few, one = normal(3, 4), normal(1, 5)
    yield row("reduce_sum, few", lambda x: jnp.sum(x, 0), few)
    yield row("reduce_max, one", lambda x: jnp.max(x, (0, 1)), one)
    yield row("reduce_prod, nothing", lambda x: jnp.prod(x, 0), normal(0, 5))
    yield row("argmin, few", lambda x: lax.argmin(x, 0, np.int32), few)
    yield row("cumsum, few", lambda x: lax.cumsum(x, axis=0), few)
    yield row("cummax, few, backwards", lambda x: lax.cummax(x, axis=1, reverse=True), few)
    yield row("dot_general, few", lambda x, y: x @ y, few, normal(4, 1))
    yield row("dot_general, one", lambda x, y: x @ y, normal(5, 1), one)
    yield row("dot_general, nothing", lambda x, y: x @ y, normal(3, 0), normal(0, 2))
    yield row("slice, few", lambda x: x[1:3, ::2], few)
    yield row("pad, few", lambda x: lax.pad(x, 1.5, ((4, 0, 1), (0, 7, 0))), few)
    yield row("pad, nothing", lambda x: lax.pad(x, 1.5, ((2, 3, 0), (0, 0, 0))), normal(0, 4))
    yield row("concatenate, few", lambda x, y: lax.concatenate([x, y], 0), few, normal(1, 4))
    yield row("rev, few", lambda x: lax.rev(x, (0,)), few)
    yield row("reshape, few", lambda x: x.reshape(2, 1, 6), few)
    yield row("top_k, few", lambda x: lax.top_k(x, 4), few)
    yield row("sort, few", lambda x: lax.sort(x, dimension=0), few)
    yield row("broadcast_in_dim, scalar", lambda x: lax.broadcast_in_dim(x, (3, 4), ()), np.float32(3))
    yield row("iota, few", lambda: lax.broadcasted_iota(jnp.uint8, (4, 3), 0))
    yield row("gather, few", lambda x, i: x.at[i].get(mode="fill"), few, np.array([2, -1, 5], np.int32))
    yield row("scatter-add, few", lambda x, i: x.at[i].add(2.0), few, np.array([2, 0], np.int32))
    yield row("dynamic_slice, few", lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)), few, np.int32(2))
    update = lambda x, i: lax.dynamic_update_slice(x, -x[:2, :1], (i, i))  # noqa: E731
    yield row("dynamic_update_slice, few", update, few, np.int32(7))
    pool = lambda x: lax.reduce_window(x, -np.inf, lax.max, (3, 2), (1, 1), "VALID")  # noqa: E731
    yield row("reduce_window_max, few", pool, few)
    conv = lambda x, k: lax.conv_general_dilated(x, k, (1,), [(2, 2)])  # noqa: E731
    yield row("conv_general_dilated, few", conv, normal(1, 2, 4), normal(3, 2, 3))


def narrow():
    """Other dtypes: what an identity is, and what a collective can add, depends on them."""
    brain = X.astype(jnp.bfloat16)
    yield row("reduce_sum, bfloat16", lambda x: jnp.sum(x, 1), brain)
    yield row("reduce_max, bfloat16", lambda x: jnp.max(x, 0), brain)
    yield row("cumsum, bfloat16", lambda x: lax.cumsum(x, axis=1), brain)
    yield row("dot_general, bfloat16", lambda x, y: x @ y.T, brain, Y.astype(jnp.bfloat16))
    yield row("argmax, bfloat16", lambda x: lax.argmax(x, 0, np.int32), brain)
    yield row("top_k, bfloat16", lambda x: lax.top_k(x, 3), brain)
    for name, dtype in (("s8", np.int8), ("u8", np.uint8), ("u32", np.uint32)):
        numbers = N.astype(dtype)
        yield row(f"reduce_sum, {name}", lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), numbers)
        yield row(f"reduce_min, {name}", lambda x: jnp.min(x, 0), numbers)
        yield row(f"reduce_max, {name}", lambda x: jnp.max(x, 0), numbers)
        yield row(f"reduce_or, {name}", lambda x: jnp.bitwise_or.reduce(x, 1), numbers)
        yield row(f"argmax, {name}", lambda x: lax.argmax(x, 1, np.int32), numbers)
        yield row(f"cummin, {name}", lambda x: lax.cummin(x, axis=0), numbers)
        yield row(f"top_k, {name}", lambda x: lax.top_k(x, 4), numbers)
        yield row(f"scatter-max, {name}", lambda x, i, u: x.at[i].max(u), numbers, np.array([2, 9, -1]), numbers[:3])
        yield row(f"gather, {name}", lambda x, i: x.at[i].get(mode="fill"), numbers, np.array([2, 9, -1, -8]))
    phases = X + 1j * Y
    yield row("reduce_sum, complex", lambda x: jnp.sum(x, 0), phases)
    yield row("dot_general, complex", lambda x, y: x @ y.T, phases, phases[::-1].copy())
    yield row("cumprod, complex", lambda x: lax.cumprod(x, axis=1), phases)
    twice = np.array([1, 6])
    yield row("scatter-add, complex", lambda x, i, u: x.at[i].add(u), phases, twice, phases[:2])
    yield row("sort, integers", lambda x: lax.sort(x, dimension=0), N)
    yield row("rev, booleans", lambda x: lax.rev(x, (1,)), X > 0)
    yield row("pad, integers", lambda x: lax.pad(x, -1, ((1, 2, 0), (0, 1, 1))), N)
    keys = jax.random.split(jax.random.key(7), 6)
    spread = lambda k: jax.random.key_data(jnp.broadcast_to(k[:, None], (6, 4)))  # noqa: E731
    yield row("broadcast_in_dim, keys", spread, keys)
    yield row("concatenate_slices, keys", lambda k: jax.random.key_data(jnp.concatenate([k, k[:3]])), keys)
    yield row("gather, keys", lambda k, i: jax.random.key_data(k[i]), keys, np.array([5, 0, 3]))
    yield row("reshape, keys", lambda k: jax.random.key_data(k.reshape(2, 3)), keys)


def partial_windows():
    """Windows that take or write a part of a dimension, over the borders of shards and out of range."""
    numbers, scattering = lax.GatherDimensionNumbers, lax.ScatterDimensionNumbers
    starts = np.array([[3, 1], [0, 4], [9, 2], [-1, 3], [5, 7], [6, 8], [2, 0]], np.int32)
    both, one, none = ((0, 1), (4, 3)), ((0,), (4, 3)), ((), (4, 10))
    for mode in ("clip", "fill"):
        for name, (mapped, sizes) in {"both": both, "one": one, "none": none}.items():
            how = numbers((1, 2), (), mapped)
            call = lambda x, i, how=how, sizes=sizes, mode=mode: lax.gather(x, i, how, sizes, mode=mode)  # noqa: E731
            yield row(f"gather, windows of {name}, {mode}", call, X, starts[:, : len(mapped)])
            yield row(f"gather, integer windows of {name}, {mode}", call, N, starts[:, : len(mapped)])
            lone = call(X, starts[:1, : len(mapped)])
            spread = scattering((1, 2), (), mapped)
            for verb in (lax.scatter, lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_max):
                write = lambda x, i, u, f=verb, how=spread, mode=mode: f(x, i, u, how, mode=mode)  # noqa: E731
                # Only one window is set, for the order of several is not fixed; it fits, or all would be dropped.
                lone_at = starts[4:5] if mode == "clip" else starts[:1]
                at = (lone_at if verb is lax.scatter else starts)[:, : len(mapped)]
                title = f"{verb.__name__.replace('_', '-')}, windows of {name}, {mode}"
                yield row(title, write, X, at, normal(len(at), *lone.shape[1:]))
    columns = numbers((1,), (0,), (0, 1))
    yield row("gather, a row's window", lambda x, i: lax.gather(x, i, columns, (1, 4), mode="fill"), N, starts)
    yield row("gather, unsigned windows", lambda x, i: lax.gather(x, i, columns, (1, 4), mode="clip"), N,
              starts.astype(np.uint8))  # fmt: skip
    row_of = scattering((1,), (0,), (0, 1))
    put = lambda x, i, u: lax.scatter(x, i, u, row_of, mode="drop")  # noqa: E731
    yield row("scatter, a row's window", put, N, starts[[0, 2, 4, 5]], whole(4, 4))
    yield row("scatter, one row's window", put, N, starts[5:6], whole(1, 4))
    yield row("scatter-sub, rows", lambda x, i, u: x.at[i].subtract(u), N, starts[:, 0], whole(7, 10))


def attention_rows():
    """Attention and its gradient: as many keys as queries (a ring) and others (merged), masks, uneven sizes."""
    q, k, v = normal(2, 10, 4, 3), normal(2, 10, 2, 3, seed=1), normal(2, 10, 2, 5, seed=2)
    more = normal(2, 9, 2, 3, seed=1), normal(2, 9, 2, 5, seed=2)
    segments = np.arange(10) // 4
    ways = {
        "": ((k, v), {}),
        ", causal": ((k, v), {"is_causal": True}),
        ", window": ((k, v), {"local_window_size": (3, 1)}),
        ", segments": ((k, v), {"query_segments": segments, "key_segments": segments}),
        ", mask": (
            (k, v),
            {"mask": np.tri(10, 10, 2, dtype=bool), "query_positions": 9 - np.arange(10), "is_causal": True},
        ),
        ", keys": (more, {"is_causal": True, "key_value_seq_lengths": np.array([4, 9])}),
    }
    for name, ((k, v), options) in ways.items():
        run = lambda q, k, v, options=options: attention(q, k, v, **options)  # noqa: E731
        yield row(f"gshard_attention{name}", run, q, k, v)
        back = lambda q, k, v, ct, run=run: jax.vjp(run, q, k, v)[1](ct)  # noqa: E731
        yield row(f"gshard_attention_gradient{name}", back, q, k, v, normal(2, 10, 4, 5, seed=3))


def rows_with_places():
    """Rows that move to places of their own; some have no place, and some places have no row."""
    places = np.array([[3, -1], [12, 0], [40, 7], [1, 9], [5, 13], [11, 2], [10, 6]])
    yield row("gshard_put_rows", lambda x, to: put_rows(x, to, 14), normal(7, 3), places)
    yield row("gshard_put_rows, each its own", lambda x, to: put_rows(x, to, 5), N.astype(bool), places[:, 0])
    yield row("gshard_take_rows", take_rows, normal(14, 3), places)
    back = lambda x, ct: jax.vjp(lambda x: take_rows(x, places), x)[1](ct)  # noqa: E731
    yield row("gshard_put_rows, of each choice", back, normal(14, 3), normal(7, 2, 3, seed=1))
    batches = np.stack([places, np.roll(places, 1, 0) + 2, places[::-1]])
    yield row("gshard_put_rows, batches", jax.vmap(lambda x, to: put_rows(x, to, 14)), normal(3, 7, 3), batches)
    yield row("gshard_take_rows, batches", jax.vmap(take_rows), normal(3, 14, 3), batches)


def grouped():
    """Rows that belong to groups, some of them empty, the last rows to none; and what is kept whole or taken apart."""
    numbers = lax.RaggedDotDimensionNumbers
    sizes = np.array([2, 0, 4, 3, 0], np.int32)
    rows_, matrices, free = normal(10, 6), normal(5, 6, 4), normal(10, 3)
    yield row("ragged_dot_general, rows", lax.ragged_dot, rows_, matrices, sizes)
    sums_of = lambda x, y, n: lax.ragged_dot_general(x, y, n, numbers((((0,), (0,)), ((), ())), (0,), ()))  # noqa: E731
    yield row("ragged_dot_general, sums", sums_of, rows_, free, sizes)
    batches = numbers((((2,), (2,)), ((0,), (0,))), (1,), (1,))
    of_batches = lambda x, y, n: lax.ragged_dot_general(x, y, n, batches)  # noqa: E731
    x, y = normal(3, 10, 6), normal(3, 5, 6, 4)
    yield row("ragged_dot_general, batches", of_batches, x, y, sizes)
    each = np.stack([sizes, sizes[::-1], sizes + 1][:3]).astype(np.int32)
    yield row("ragged_dot_general, each batch its own", of_batches, x, y, each)
    sums = numbers((((1,), (1,)), ((0,), (0,))), (1,), ())
    sums_of_each = lambda x, y, n: lax.ragged_dot_general(x, y, n, sums)  # noqa: E731
    yield row("ragged_dot_general, sums of each batch", sums_of_each, x, normal(3, 10, 4), each)
    free_first = numbers((((3,), (2,)), ((0,), (0,))), (2,), (1,))
    for count in (1, 3):  # batches of one, with sizes for each of the dimensions before the ragged one
        rows_of = lambda x, y, n: lax.ragged_dot_general(x, y, n, free_first)  # noqa: E731
        sizes_of = np.broadcast_to(each[:count, None], (count, 2, 5)).astype(np.int32)
        of_rows, of_groups = normal(count, 2, 10, 6), normal(count, 5, 6, 4)
        yield row(f"ragged_dot_general, {count} of rows", rows_of, of_rows, of_groups, sizes_of)
    batch_sizes = np.array([1, 0, 1, 1, 0], np.int32)
    which = lambda x, y, n: lax.ragged_dot_general(x, y, n, numbers((((2,), (1,)), ((0,), (0,))), (0,), ()))  # noqa: E731
    yield row("ragged_dot_general, ragged batch", which, x, normal(3, 6, 4), batch_sizes)
    product = gshard_kernel(lambda x, w: x @ w, like=lambda x, w: x @ w)
    yield row("gshard_kernel, product", product, normal(7, 6), normal(6, 5))
    yield from attention_rows()
    yield from rows_with_places()
    yield row("pallas_call, mapped", jax.vmap(kernel), normal(7, 5, 4), normal(7, 4))
    yield row("pallas_call, mapped twice", jax.vmap(jax.vmap(kernel, (0, None)), 1), normal(6, 3, 5, 4), normal(4, 3))
    key = np.arange(4, dtype=np.uint32)
    yield row("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (7, 10)), key)
    lower, diagonal, upper = normal(3, 6), 4 + np.abs(normal(3, 6)), normal(3, 6, seed=1)
    lower[:, 0] = upper[:, -1] = 0
    solve = lax.linalg.tridiagonal_solve
    yield row("tridiagonal_solve", solve, lower, diagonal, upper, normal(3, 6, 5))
    gammas = lambda k, a: jax.vmap(lambda k, a: jax.random.gamma(k, a, (4,)))(k, a)  # noqa: E731
    yield row("random_gamma", gammas, jax.random.split(jax.random.key(3), 6), np.arange(1, 7, dtype=np.float32))
    least = np.array([np.inf, 3, -np.nan, np.nan, -np.inf, -2, -np.nan], np.float32)
    yield row("top_k, negative nan", lambda x: lax.top_k(x, 7), least)
    yield row("top_k, negative nan, bfloat16", lambda x: lax.top_k(x, 6), least.astype(jnp.bfloat16))
