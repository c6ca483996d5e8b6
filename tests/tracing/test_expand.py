"""What stands for an equation, and transforms between gathers: solves, named axes, layouts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.scipy.sparse.linalg import bicgstab, cg, gmres
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard.core.errors import ArgumentError
from placed import mesh_of, three_calls

RNG = np.random.default_rng(11)
X = RNG.standard_normal((8, 6)).astype(np.float32)
SQUARE = RNG.standard_normal((8, 8)).astype(np.float32)
SQUARE = SQUARE @ SQUARE.T + 4 * np.eye(8, dtype=np.float32)
SQUARES = np.stack([SQUARE + i for i in range(8)])
SIDE, SIDES = RNG.standard_normal(8).astype(np.float32), RNG.standard_normal((8, 8)).astype(np.float32)


def exact(a, b):
    """A solve with derivatives of its own, and something that it says beside."""
    solver = lambda mv, b: (jnp.linalg.solve(a, b), {"sum": b.sum()})  # noqa: E731
    return lax.custom_linear_solve(lambda x: a @ x, b, solver, symmetric=True, has_aux=True)


def by(solver):
    return lambda a, b: solver(lambda x: a @ x, b, tol=1e-6)[0]


def of_trees(a, b):
    return cg(lambda x: {"p": a @ x["p"], "q": 2 * x["q"]}, {"p": b, "q": b})[0]


SOLVES = {
    "cg": (by(cg), (SQUARE, SIDE)),
    "gmres, one matrix": (jax.vmap(by(gmres), (None, 0)), (SQUARE, SIDES[:5])),
    "bicgstab, mapped": (jax.vmap(by(bicgstab)), (SQUARES, SIDES)),
    "cg, gradient of the mapped one": (
        jax.grad(lambda a, b: (jax.vmap(by(cg))(a, b) ** 2).sum(), (0, 1)), (SQUARES, SIDES)
    ),
    "of trees": (of_trees, (SQUARE, SIDE)),
    "custom_linear_solve, mapped": (jax.vmap(exact), (SQUARES, SIDES)),
    "custom_linear_solve, forward": (lambda a, b: jax.jvp(lambda a: exact(a, b)[0], (a,), (a,)), (SQUARE, SIDE)),
}  # fmt: skip


def check(function, arguments, tolerance):
    jitted = gshard.jit(function, mesh=8, in_shardings=tuple(P("devices") for _ in arguments))
    near(jitted(*arguments), jax.jit(function)(*arguments), tolerance)
    lowered = jitted.lower(*arguments)
    assert lowered.plan.gathered == ()
    return lowered


@pytest.mark.parametrize("name", SOLVES)
@pytest.mark.one_in(2)
def test_solves(name):
    """Solvers stop at a residual: what they have found agrees as well as that says."""
    check(*SOLVES[name], 2e-4)


def test_collectives_over_an_axis_that_vmap_named():
    for f in (
        lambda x: (lax.psum(x, "i"), lax.pmax(x, "i"), lax.pmin(x, "i"), lax.pmean(x, "i"), lax.psum(1, "i")),
        lambda x: lax.psum({"a": x, "b": x * 2}, "i"),
        lambda x: (lax.all_gather(x, "i"), lax.ppermute(x, "i", [(j, (j + 1) % 8) for j in range(8)])),
        lambda x: x + lax.axis_index("i"),
    ):
        check(jax.vmap(f, axis_name="i"), (X,), 1e-6)
    centred = check(jax.vmap(lambda x: x - lax.pmean(x, "i"), axis_name="i"), (X,), 1e-6)
    assert {c.kind for c in centred.spmd.collectives} == {"all_reduce"}, "parts stay split until they are combined"
    twice = jax.vmap(jax.vmap(lambda x: lax.psum(jnp.sin(x), ("i", "j")), axis_name="i"), axis_name="j")
    check(twice, (X,), 1e-5)
    check(jax.grad(lambda x: jax.vmap(lambda x: x * lax.psum(jnp.sin(x), "i"), axis_name="i")(x).sum()), (X,), 1e-5)


def test_a_transform_between_gathers_runs_on_cpu():
    """A gather along the last dimension likes another order in memory than the transform can take."""

    def spectrum(x):
        y = gshard.split(jnp.real(jnp.fft.fft2(jnp.tanh(x * 2))), 2, 8)
        return jnp.sum(gshard.replicate(-y), 1)

    x = RNG.standard_normal((4, 4, 64)).astype(np.float32)
    jitted = gshard.jit(spectrum, mesh=8, in_shardings=(P(None, "devices"),))
    np.testing.assert_allclose(jitted(x), -np.real(np.fft.fft2(np.tanh(x * 2))).sum(1), rtol=1e-4, atol=1e-4)


def test_an_order_in_memory_is_that_of_every_part():
    f = lambda x: jnp.sin(with_layout_constraint(x * 2, Layout((1, 0)))) + 1  # noqa: E731
    assert check(f, (X,), 1e-6).spmd.collectives == ()
    check(f, (X[:5],), 1e-6)


@dataclasses.dataclass
class Narrow:
    """Integers and a scale for each row."""

    values: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class NarrowType(hijax.HiType):
    shape: tuple[int, ...]

    def lo_ty(self):
        return [jax.core.ShapedArray(self.shape, np.int8), jax.core.ShapedArray(self.shape[:1], np.float32)]

    def lower_val(self, x):
        return [x.values, x.scales]

    def raise_val(self, values, scales):
        return Narrow(values, scales)


hijax.register_hitype(Narrow, lambda x: NarrowType(x.values.shape))


class Converted(getattr(hijax, "VJPHiPrimitive", None) or hijax.HiPrim):
    """From a Narrow to an array, or back."""

    def __init__(self, aval):
        shape = aval.shape
        back = jax.core.ShapedArray(shape, np.float32)
        self.in_avals, self.out_aval = (aval,), back if isinstance(aval, NarrowType) else NarrowType(shape)
        self.params = {}
        super().__init__()

    def expand(self, x):
        if isinstance(x, Narrow):
            return x.values.astype(np.float32) * x.scales[:, None]
        return Narrow((x * 10).astype(np.int8), jnp.full(x.shape[:1], 0.1, np.float32))


def converted(x):
    return Converted(jax.typeof(x))(x)


HELD = Narrow(jnp.arange(32, dtype=np.int8).reshape(8, 4), jnp.arange(8.0))


@pytest.mark.parametrize("outside", ["gshard.jit", "jax.jit"])
@pytest.mark.parametrize("inside", ["straight", "closed over", "scan", "cond"])
def test_values_of_a_type_of_hijax_are_the_arrays_they_consist_of(inside, outside):
    def narrowed(x):
        return converted(converted(gshard.split(x, 0, 8))) + 1

    f = {
        "straight": narrowed,
        "closed over": lambda x: gshard.split(x, 0, 8) + converted(HELD),
        "scan": lambda x: jax.lax.scan(lambda c, _: (narrowed(c), c.sum()), x, None, length=2),
        "cond": lambda x: jax.lax.cond(x.sum() > 0, narrowed, jnp.sin, x),
    }[inside]
    x = np.arange(32, dtype=np.float32).reshape(8, 4) % 5
    jitted = gshard.jit(f, mesh=8)
    for got in three_calls(jax.jit(lambda x: jitted(x)) if outside == "jax.jit" else jitted, mesh_of(d=8), x):
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(f)(x))


def test_arguments_and_results_of_types_of_hijax_are_refused():
    x = jnp.ones((8, 4))
    with pytest.raises(ArgumentError, match=r"(?s)x\['a'\] is of another type.*test_expand.py.*Narrow.*Pass"):
        gshard.jit(lambda x: converted(x["a"]), mesh=8)({"a": HELD})
    with pytest.raises(ArgumentError, match=r"(?s)result 0 is of another type.*test_expand.py.*NarrowType"):
        gshard.jit(converted, mesh=8)(x)
