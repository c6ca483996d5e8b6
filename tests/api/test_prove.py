"""``gshard.prove``: which programs are equal, which identities count, and what a wrong program is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from families import CASES, SMALL
from gshard.testing import assert_proved
from sampled import sampled

X, Y = (jax.ShapeDtypeStruct((6, 8), "float32"),) * 2
LOG_SUM = jax.nn.logsumexp
EQUAL = {
    "sums in another order": (lambda x, y: (x + y).sum(), lambda x, y: y.sum() + x.sum(0).sum()),
    "products": (lambda x, y: (x * y) @ y.T, lambda x, y: jnp.einsum("ij,kj,ij->ik", y, y, x)),
    "quotients": (lambda x, y: x / y / 2, lambda x, y: 0.5 * x * (1 / y)),
    "exponentials": (lambda x, y: jnp.exp(x + 2 * y), lambda x, y: jnp.exp(x) * jnp.exp(y) ** 2),
    "roots": (lambda x, y: jnp.sqrt(x * x) * jax.lax.rsqrt(y * y), lambda x, y: jnp.abs(x) / jnp.abs(y)),
    "the shift of a softmax": (
        lambda x, y: jax.nn.softmax(jnp.tanh(x) @ y.T),
        lambda x, y: (e := jnp.exp((s := jnp.tanh(x) @ y.T) - s.max())) / e.sum(-1, keepdims=True),
    ),
    "a softmax in parts": (
        lambda x, y: LOG_SUM(jnp.tanh(x), 1),
        lambda x, y: jnp.logaddexp(LOG_SUM(jnp.tanh(x[:, :3]), 1), LOG_SUM(jnp.tanh(x[:, 3:]), 1)),
    ),
    "its gradient": (lambda x, y: jax.grad(lambda x: LOG_SUM(x, 1).sum())(x), lambda x, y: jax.nn.softmax(x, 1)),
    "the largest of parts": (lambda x, y: x.max(), lambda x, y: jnp.maximum(x[:2].max(1).max(), x[2:].max())),
    "sorted rows": (lambda x, y: jnp.sort(x, 1)[:, -2:], lambda x, y: jax.lax.top_k(x, 2)[0][:, ::-1]),
    "masks": (
        lambda x, y: jax.nn.softmax(jnp.where(jnp.arange(8) < 5, x, -1e30), 1)[:, :5],
        lambda x, y: jax.nn.softmax(x[:, :5], 1),
    ),
    "a loop": (
        lambda x, y: jax.lax.fori_loop(0, 3, lambda i, c: c @ y.T @ y, x),
        lambda x, y: x @ (y.T @ y @ y.T @ y @ y.T @ y),
    ),
    "branches": (
        lambda x, y: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, y),
        lambda x, y: jnp.where(x.sum() > 0, jnp.sin(y), jnp.cos(y)),
    ),
    "Fourier transforms": (
        lambda x, y: jnp.fft.fft2(x).real,
        lambda x, y: jnp.fft.fft(jnp.fft.fft(x, axis=0), axis=1).real,
    ),
    "bits of floats": (
        lambda x, y: jnp.copysign(x, y)[::-1] + jnp.nextafter(x, y),
        lambda x, y: jnp.copysign(x[::-1], y[::-1]) + jnp.nextafter(x, y),
    ),
    "random bits": (
        lambda x, y: x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape),
        lambda x, y: jnp.where(jax.random.uniform(jax.random.key(1), x.shape) < 0.5, x, 0),
    ),
}  # fmt: skip
DIFFERENT = {
    "a factor": (lambda x, y: x / 8, lambda x, y: x / 9),
    "one element": (lambda x, y: x.at[2, 3].add(0.5), lambda x, y: x),
    "one branch": (lambda x, y: jnp.where(x.sum() > 0, x, 2 * x), lambda x, y: jnp.where(x.sum() > 0, x, 3 * x)),
    "a mask": (lambda x, y: jnp.tril(x @ y.T), lambda x, y: jnp.tril(x @ y.T, -1)),
    "an order": (lambda x, y: jnp.argmax(x, 1), lambda x, y: jnp.argmin(x, 1)),
}
UNDECIDED = {
    "sines and cosines": (lambda x, y: jnp.sin(x) ** 2 + jnp.cos(x) ** 2, lambda x, y: jnp.ones_like(x)),
    "the next float": (lambda x, y: (x.view("int32") + 1).view("float32"), lambda x, y: x + 1),
}
VERDICTS = {"equal": EQUAL, "different": DIFFERENT, "undecided": UNDECIDED}
PAIRS = {name: (verdict, *pair) for verdict, pairs in VERDICTS.items() for name, pair in pairs.items()}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_equal(name):
    verdict, some, other = PAIRS[name]
    for f, like in ((some, other), (other, some)):
        assert gshard.prove(f, X, Y, like=like).verdict == verdict


ALL = {**CASES, **SMALL}
LARGE = {
    name for name in ALL if name.startswith(("small/neural", "small/vort", "windows/convolution_of_batch"))
}  # transforms of whole fields


SAMPLE = sampled([n for n in ALL if n not in LARGE], lambda n: n.partition("/")[0], lambda n: 6, "prove")


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_what_gshard_makes_of_a_program_is_the_program(name):
    case = ALL[name]
    assert_proved(gshard.jit(case.function, mesh=gshard.Mesh.abstract(**case.mesh)), case.arguments)


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def test_a_gradient_that_jax_sums_twice():
    """https://github.com/jax-ml/jax/issues/36886"""
    samples, params = np.ones((4, 2), np.float32), np.ones(2, np.float32)
    plain = jax.vmap(jax.grad(jnp.dot), (None, 0))
    sharded = jax.shard_map(plain, mesh=mesh(d=4), in_specs=(P(), P("d")), out_specs=P("d"))
    proof = gshard.prove(sharded, params, samples, like=plain)
    assert proof.verdict == "different"
    assert proof.elements == (8, 8)
    assert proof.line.startswith("test_prove.py:")


def test_a_result_that_devices_do_not_share():
    def shared(f):
        return jax.shard_map(f, mesh=mesh(d=2), in_specs=P("d"), out_specs=P(), check_vma=False)

    with pytest.raises(AssertionError, match="not summed over d"):
        assert_proved(shared(lambda x: x.sum(0)), (X,), like=lambda x: x.sum(0))
    imaginary = lambda x: jax.lax.complex(jnp.zeros(8), x.sum(0))  # noqa: E731
    assert gshard.prove(shared(imaginary), X, like=imaginary).verdict == "different"
    assert gshard.prove(shared(imaginary), X, like=lambda x: imaginary(x[:3])).verdict == "different"


WRONG = {
    "would wait": lambda x: jax.lax.cond(x.sum() > 0, lambda x: jax.lax.psum(x, "a"), lambda x: x, x),
    "another order": lambda x: jax.lax.ppermute(x, ("b", "a"), [(0, 1), (1, 0)]),
}


@pytest.mark.parametrize("cause", WRONG)
def test_what_devices_cannot_run(cause):
    f = jax.shard_map(WRONG[cause], mesh=mesh(a=2, b=2), in_specs=P("a"), out_specs=P("a"), check_vma=False)
    proof = gshard.prove(f, X, like=lambda x: x)
    assert (proof.verdict, cause in proof.cause) == ("undecided", True)


def test_an_axis_that_vmap_makes_a_dimension():
    def one(x):
        jax.debug.print("{x}", x=x)
        return x / jax.lax.psum(x, "i")

    rows = jax.vmap(one, axis_name="i")
    assert_proved(rows, (X,), like=lambda x: x / x.sum(0))


def test_what_xla_makes_of_a_function():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (jax.nn.gelu(x @ w) ** 2).sum())(w)

    devices = mesh(a=2, b=2)
    w, x = np.ones((8, 4), np.float32), np.ones((6, 8), np.float32)
    places = NamedSharding(devices, P(None, "b")), NamedSharding(devices, P("a", None))
    assert_proved(jax.jit(step, in_shardings=places), (w, x))


def test_numbers_as_arguments():
    """Numbers of Python are arguments of a function from ``gshard.jit`` and of its ``like``, but for static ones."""

    def plain(x, rate, n, power, *, axis, scale=2):
        return (rate * x.sum(axis) ** power + n) * scale

    step = gshard.jit(
        lambda x, *numbers, **named: plain(gshard.split(x, 0, "d"), *numbers, **named),
        mesh=gshard.Mesh.abstract(d=2), static_argnums=3, static_argnames="axis",
    )  # fmt: skip
    for like in (None, plain, jax.jit(plain, static_argnums=3, static_argnames="axis")):
        assert_proved(step, (X, 0.5, 2, 2), {"axis": 0, "scale": 2.0}, like=like)
    wrong = gshard.prove(
        step, X, 0.5, 3, 3, axis=0, like=lambda x, rate, n, power, axis: plain(x, rate, 3 - n, power, axis=axis)
    )
    assert wrong.verdict == "different"


def test_sizes_become_smaller():
    large = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4096, 8192), (8192, 28672))]
    f = gshard.jit(lambda x, w: jax.nn.relu(x @ gshard.split(w, 1, "m")), mesh=gshard.Mesh.abstract(m=8))
    proof = gshard.prove(f, *large)
    assert proof, str(proof)
    assert any("28672 -> " in text for text in proof.shrunk)


def test_dtypes():
    f, g = (lambda x: (x.astype("bfloat16") + 1).astype("float32")), (lambda x: x + 1)
    assert gshard.prove(f, X, like=g).assumed == ("conversions between float dtypes change nothing",)
    assert gshard.prove(f, X, like=g, dtypes="kept").verdict != "equal"
    assert gshard.prove(f, X, like=f, dtypes="kept")


def test_mistakes():
    with pytest.raises(gshard.ArgumentError, match="none is given"):
        gshard.prove(lambda x: x, X)
    with pytest.raises(gshard.ArgumentError, match="different results") as error:
        gshard.prove(lambda x: x, X, like=lambda x: x.sum())
    assert "float32[6,8] and float32[]" in str(error.value)
    with pytest.raises(gshard.ArgumentError, match="neither 'any' nor 'kept'"):
        gshard.prove(lambda x: x, X, like=lambda x: x, dtypes="bf16")
    proof = gshard.prove(lambda x: jax.pure_callback(np.sin, X, x), X, like=jnp.sin)
    assert proof.verdict == "undecided"
    assert "pure_callback" in proof.cause
    assert proof.line.startswith("test_prove.py:")
