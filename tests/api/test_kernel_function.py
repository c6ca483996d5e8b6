"""``gshard.kernel``: the fast function runs on shards, and the results are those of one device."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import gshard
from checked_calls import near


def plain_attention(q, k, v, *, causal=False):
    """Attention over [batch, position, head, feature]; several heads of queries share one of keys."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1]), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def attention(q, k, v, *, causal=False):
    """JAX's own, which contracts in another order."""
    fast = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
    return gshard.kernel(fast, like=functools.partial(plain_attention, causal=causal))(q, k, v)


def plain_rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _rms_norm_rows(x, scale, out):
    row = x[...]
    out[...] = row * jax.lax.rsqrt(jnp.mean(row * row, -1, keepdims=True) + 1e-6) * scale[...]


@functools.partial(gshard.kernel, like=plain_rms_norm)
def rms_norm(x, scale):
    """A Pallas kernel on one row at a time."""
    rows, features = x.shape
    blocks = [pallas.BlockSpec((1, features), lambda i: (i, 0)), pallas.BlockSpec((features,), lambda i: (0,))]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(
        _rms_norm_rows, shape, grid=(rows,), in_specs=blocks, out_specs=blocks[0], interpret=True
    )(x, scale)


product = gshard.kernel(lambda x, w: jnp.einsum("ij,jk->ik", x, w), like=lambda x, w: x @ w)


def arrays(rng, *shapes):
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def qkv(rng, batch=8):
    return arrays(rng, (batch, 16, 4, 8), (batch, 16, 2, 8), (batch, 16, 2, 8))


def three_calls(f, want, *args):
    """Calls with arrays of NumPy, on one device and on the last one."""
    for place in (np.asarray, jnp.asarray, lambda x: jax.device_put(x, jax.devices()[-1])):
        near(f(*map(place, args)), want, 2e-5)


@pytest.mark.parametrize(("mesh", "marks", "causal"), [
    ({"data": 8}, [(0, "data")], False), ({"data": 4, "model": 2}, [(0, "data"), (2, "model")], True),
    ({"sequence": 8}, [(1, "sequence")], False),
])  # fmt: skip
def test_attention_and_its_gradient(mesh, marks, causal, rng):
    def loss(attend, q, k, v):
        for dim, axis in marks:
            q = gshard.split(q, dim, axis)
        return jnp.mean(jnp.sin(attend(q, k, v, causal=causal)))

    args = qkv(rng)
    step = jax.value_and_grad(functools.partial(loss, attention), (0, 1, 2))
    plain = jax.value_and_grad(functools.partial(loss, plain_attention), (0, 1, 2))
    f = gshard.jit(step, mesh=mesh)
    three_calls(f, jax.jit(plain)(*args), *args)
    explained = gshard.explain(f, *args)
    assert not explained.lists["gathered"]
    if mesh == {"data": 8}:
        assert set(explained.bytes_by_kind) <= {"all_reduce"}  # of the loss


def test_batches_that_do_not_divide(rng):
    args = qkv(rng, batch=5)
    f = gshard.jit(lambda q, k, v: attention(gshard.split(q, 0, 4), k, v), mesh=4)
    three_calls(f, plain_attention(*args), *args)
    assert gshard.explain(f, *args).bytes_by_kind.keys() <= {"all_gather", "all_to_all"}  # of the uneven result


def test_sequences_split_where_positions_are_arguments(rng):
    def masked(q, k, v, at_q, at_k):
        scores = jnp.where(at_q[:, None] >= at_k, jnp.einsum("bqd,bkd->bqk", q, k), -1e30)
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores, -1), v)

    attend = gshard.kernel(masked, like=masked)

    def f(q, k, v):
        q = gshard.split(q, 1, "sequence")
        return attend(q, k, v, jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))

    q, k, v = arrays(rng, (2, 16, 8), (2, 16, 8), (2, 16, 8))
    jitted = gshard.jit(f, mesh={"sequence": 8})
    three_calls(jitted, masked(q, k, v, jnp.arange(16), jnp.arange(16)), q, k, v)
    assert jitted.lower(q, k, v).plan.splits  # the kernel ran on shards of the queries
    assert gshard.explain(jitted, q, k, v).total_bytes < 2 * q.nbytes


def test_a_pallas_kernel_runs_on_rows(rng):
    x, scale = arrays(rng, (16, 8), (8,))
    f = gshard.jit(lambda x, scale: rms_norm(gshard.split(x, 0, "data"), scale), mesh={"data": 8})
    three_calls(f, plain_rms_norm(x, scale), x, scale)
    assert gshard.explain(f, x, scale).total_bytes == 0


def test_without_a_derivative_of_the_fast_function_the_plain_one_is_used(rng):
    def slope(norm, x, scale):
        return jax.grad(lambda x, scale: jnp.mean(jnp.sin(norm(gshard.split(x, 0, 8), scale))), (0, 1))(x, scale)

    x, scale = arrays(rng, (64, 64), (64,))
    f = gshard.jit(functools.partial(slope, rms_norm), mesh=8)
    three_calls(f, slope(plain_rms_norm, x, scale), x, scale)
    # The gradient of the scale is a sum over rows: of the devices' sums.
    assert set(gshard.explain(f, x, scale).bytes_by_kind) == {"all_reduce"}


def test_in_a_loop_and_under_vmap_and_remat(rng):
    x, scales = arrays(rng, (3, 64, 64), (4, 64))

    def f(norm, x, scales):
        def layer(x, scale):
            return x + jax.checkpoint(jax.vmap(norm, (0, None)))(x, scale), None

        def loss(x, scales):
            return jnp.mean(jnp.sin(jax.lax.scan(layer, gshard.split(x, 1, 8), scales)[0]))

        return jax.value_and_grad(loss, (0, 1))(x, scales)

    jitted = gshard.jit(functools.partial(f, rms_norm), mesh=8)
    three_calls(jitted, jax.jit(functools.partial(f, plain_rms_norm))(x, scales), x, scales)
    assert set(gshard.explain(jitted, x, scales).bytes_by_kind) <= {"all_reduce"}


def test_outside_of_gshard_the_fast_function_runs(rng):
    x, w = arrays(rng, (4, 6), (6, 8))
    marked = gshard.kernel(lambda x: 2 * x, like=lambda x: 3 * x)  # not the same, on purpose
    assert marked(2.0) == 4.0
    assert jax.jit(marked)(2.0) == 4.0
    near(jax.vmap(product, (0, None))(jnp.stack([x, -x]), w), np.stack([x @ w, -x @ w]), 2e-5)
    near(jax.jvp(marked, (2.0,), (1.0,)), (4.0, 2.0), 2e-5)
    near(jax.hessian(gshard.kernel(jnp.sin, like=jnp.sin))(0.3), -np.sin(0.3), 2e-5)


def test_the_plain_function_runs_on_other_platforms():
    only_tpu = gshard.kernel(lambda x: 2 * x, like=lambda x: 3 * x, platforms="tpu")
    assert only_tpu(2.0) == 6.0  # not the same, on purpose
    assert jax.jit(only_tpu)(2.0) == 6.0


def test_pytrees_and_keywords():
    def scaled(tree, *, power):
        return {"y": tree["x"] ** power}

    kernel = gshard.kernel(scaled, like=scaled)
    got = gshard.jit(lambda x: kernel({"x": gshard.split(x, 0, 8)}, power=3), mesh=8)(np.arange(8.0, dtype=np.float32))
    np.testing.assert_array_equal(got["y"], np.arange(8.0) ** 3)


def test_the_log_says_where_the_plain_function_runs(caplog):
    x, scale = jnp.ones((4, 8)), jnp.ones(8)
    with caplog.at_level(logging.WARNING, "gshard"):
        jax.jit(jax.grad(lambda x: rms_norm(x, scale).sum()))(x)
    assert "the plain function of kernel gradient of rms_norm runs" in caplog.text
    assert "kernel rms_norm runs" not in caplog.text


def test_a_kernel_in_the_plain_function_of_another(rng):
    x, w = arrays(rng, (8, 6), (6, 4))
    outer = gshard.kernel(lambda x, w: jnp.sin(x @ w), like=lambda x, w: jnp.sin(product(x, w)))
    f = gshard.jit(lambda x, w: outer(gshard.split(x, 0, 8), w), mesh=8)
    three_calls(f, np.sin(x @ w), x, w)
    assert gshard.explain(f, x, w).total_bytes == 0


def test_a_split_that_the_fast_function_refuses_is_not_made(rng):
    def fast(x):
        if x.shape[0] % 4:
            raise ValueError("blocks have four rows")
        return 2 * x

    kernel = gshard.kernel(fast, like=lambda x: 2 * x)
    x = rng.standard_normal((16, 4), np.float32)
    f = gshard.jit(lambda x: kernel(gshard.split(x, 0, 8)), mesh=8)
    three_calls(f, 2 * x, x)
    assert gshard.explain(f, x).total_bytes > 0  # gathered


def refused(match, kernel, *args, error=gshard.ArgumentError):
    with pytest.raises(error, match=match) as raised:
        kernel(*args)
    assert "test_kernel_function.py" in str(raised.value)


def test_what_cannot_be_a_kernel():
    x = jnp.ones((4, 4))
    refused("return different types", gshard.kernel(lambda x: x, like=lambda x: x.sum()), x)
    refused("return different types", gshard.kernel(lambda x: x, like=lambda x: (x, x)), x)
    refused("not an array", gshard.kernel(lambda x, how: x, like=lambda x, how: x), x, "fast")
    marks = gshard.kernel(lambda x: x, like=lambda x: gshard.split(x, 0, 4))
    refused("cannot say how arrays are sharded", marks, x, error=gshard.ShardingError)
    with pytest.raises(gshard.ArgumentError, match="a str is not a function"):
        gshard.kernel(jnp.sin, like="sin")
    with pytest.raises(gshard.ArgumentError, match="a float is not a function"):
        gshard.kernel(1.0, like=jnp.sin)


def test_arrays_of_a_traced_function_outside_are_refused():
    def f(x, w):
        return gshard.kernel(lambda x: x @ w, like=lambda x: x @ w)(x)

    with pytest.raises(gshard.ArgumentError, match="uses an array from outside"):
        jax.jit(f)(jnp.ones((4, 4)), jnp.ones((4, 4)))
