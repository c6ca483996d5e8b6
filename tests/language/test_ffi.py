"""FFI calls: alone, mapped in each way that JAX knows, and with a rule of the user's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.language.registry import unregister

TARGET = "lapack_spotrf_ffi"  # the Cholesky factor of a matrix, in place; of the last two dimensions


@pytest.fixture(autouse=True)
def lapack():
    """JAX looks for LAPACK when it first needs it."""
    jnp.linalg.cholesky(jnp.eye(2))
    yield
    unregister("ffi_call")


def factor(x, method=None):
    """The lower factor: the upper one for LAPACK, which reads columns first."""
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32)
    call = jax.ffi.ffi_call(TARGET, results, vmap_method=method, input_output_aliases={0: 0})
    made, failed = call(x, uplo=np.uint8(ord("U")))
    return jnp.tril(made), failed


def matrices(*batch):
    x = np.random.default_rng(0).standard_normal((*batch, 6, 6)).astype(np.float32)
    return x @ np.swapaxes(x, -1, -2) + 6 * np.eye(6, dtype=np.float32)


def check(partitioned, x):
    made, failed = partitioned(x)
    np.testing.assert_allclose(made, np.linalg.cholesky(x), rtol=1e-4, atol=1e-4)
    assert not np.any(failed)


def test_alone_it_is_gathered_and_told():
    x = matrices(8)
    partitioned = gshard.jit(lambda x: factor(gshard.split(x, 0, 8)), mesh=8)
    check(partitioned, x)
    assert "ffi_call at test_ffi.py" in gshard.explain(partitioned, x).gathered[0]
    with pytest.raises(gshard.PlanError, match="'ffi_call' has no rule"):
        gshard.jit(lambda x: factor(gshard.split(x, 0, 8)), mesh=8, strict=True)(x)


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
@pytest.mark.parametrize("n", [8, 13])
def test_one_after_the_other_sends_nothing(n, method):
    x = matrices(n)
    partitioned = gshard.jit(lambda x: jax.vmap(lambda x: factor(x, method))(gshard.split(x, 0, 8)), mesh=8)
    check(partitioned, x)
    if n == 8:
        assert not partitioned.lower(x).spmd.collectives


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_with_more_dimensions_it_is_told_until_there_is_a_rule(method):
    x = matrices(8)

    def f(x):
        return jax.vmap(lambda x: factor(x, method))(gshard.split(x, 0, 8))

    partitioned = gshard.jit(f, mesh=8)
    check(partitioned, x)
    assert gshard.explain(partitioned, x).gathered
    gshard.rule("ffi_call", target=TARGET)("... a b -> ... a b, ...; replicate a b")
    check(partitioned, x)
    assert not gshard.explain(partitioned, x).gathered
    assert not partitioned.lower(x).spmd.collectives
