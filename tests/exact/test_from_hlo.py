"""What XLA's partitioner made of a function, as a jaxpr, computes what the function does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.peer import xla_function
from jax import P, lax
from jax.sharding import NamedSharding

import gshard
from families import CASES
from gshard.emit.compile import named_sharding
from gshard.exact.from_hlo import partitioned
from placed import mesh_of

GRID, LINE, SIX, ONE = {"d": 4, "t": 2}, {"d": 8}, {"d": 3, "t": 2}, {"d": 1}
QUICK = "layers/layer_two_dimensional' moves/roll windows/convolutions contractions/uneven_rows".split()


def constrained(x, mesh, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def summed(x, mesh):
    part = lambda y: lax.psum(y * lax.axis_index("d"), "d")  # noqa: E731
    return jax.shard_map(part, mesh=mesh, in_specs=P("d"), out_specs=P(), axis_names={"d"})(x)


def sent(x, mesh):
    def local(y):
        groups = [[0, 3], [1, 2], [5, 4], [7, 6]]
        whole = jnp.tile(y, (8, 1)) * lax.axis_index("d")
        found = (
            lax.psum_scatter(lax.all_gather(y, "d"), "d"),
            lax.pmax(y, "d"),
            lax.psum(y, "d", axis_index_groups=groups),
        )
        moved = lax.all_to_all(whole, "d", 0, 1, tiled=True), lax.ppermute(y, "d", [(0, 3), (3, 1)])
        return jax.tree.map(lambda z: z[None], (found, moved, lax.all_gather(y, "d", axis_index_groups=groups)))

    return jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)(x)


ROWS = {
    "product, sort": (GRID, lambda x, m: ((x @ x.T).sum(0), jnp.sort(x, 0), jnp.argsort(x, 1, descending=True))),
    "two keys": (LINE, lambda x, m: lax.sort(((x > 0).astype(int), x, x + 1), num_keys=2)),
    "uneven": (LINE, lambda x, m: jnp.cumsum(constrained(x[:7] * 2, m, "d"), 0)[::-1]),
    "uneven result": (SIX, lambda x, m: constrained(x[:5] + x[1:], m, "d")),
    "argmax": (GRID, lambda x, m: (jnp.argmax(constrained(x[:-1], m, "d"), 0), jnp.argmin(x, 1), lax.top_k(x, 3))),
    "partly manual": (GRID, summed),
    "bool, bfloat16": (LINE, lambda x, m: (x.astype("bfloat16").sum(0), (x > 0).all(0), (x > 0).any(1))),
    "int8, float16": (LINE, lambda x, m: (jnp.prod(x, 0), x.astype("float16").min(0), x.astype("int8").max(0), x[:0])),
    "branches": (LINE, lambda x, m: lax.switch(x[0, 0].astype(int) + 9, [jnp.sum, jnp.max, jnp.min], x)),
    "indices": (GRID, lambda x, m: (x[jnp.array([1, 9, -9])], x.at[jnp.array([1, 30, 3])].add(1.0), x.at[2].max(3.0))),
    "random": (LINE, lambda x, m: x + jax.random.normal(jax.random.key(3), x.shape)),
    "written out": (LINE, lambda x, m: (jax.nn.gelu(x, approximate=False), lax.digamma(x), jnp.sinh(x))),
    "collectives": (LINE, sent),
    "cholesky": (GRID, lambda x, m: jnp.linalg.cholesky(x.T @ x)),
    "not finite": (LINE, lambda x, m: (jnp.isnan(x / 0 * 0), x / 0 > np.float32([np.inf, -np.inf, np.nan, 0, 1, 2]))),
    "one device": (ONE, lambda x, m: (summed(x, m), lax.scan(lambda c, r: (c + r, c), x[0], x))),
}


@pytest.mark.parametrize("name", ROWS)
def test_functions(name):
    axes, function = ROWS[name]
    mesh = mesh_of(**axes, order=(5, 2, 7, 0, 1, 3, 4, 6))
    x = np.random.default_rng(0).normal(size=(6 if axes is SIX else 8, 6)).astype(np.float32)
    proof = gshard.prove(jax.jit(lambda x: function(x, mesh), in_shardings=NamedSharding(mesh, P(*axes))), x)
    assert proof, proof


def test_a_wrong_derivative_of_xla_is_found_at_its_line():
    """XLA puts elements of a maximum over overlapping windows into wrong places, where the windows are split."""

    def pooled(x):
        return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (3,), (1,), "SAME") ** 2)

    f, x = jax.grad(pooled), np.random.default_rng(0).random(64, np.float32)
    split = jax.jit(f, in_shardings=NamedSharding(mesh_of(**LINE), P("d")))
    assert not np.allclose(split(x), jax.jit(f)(x))
    proof, line = gshard.prove(split, x), pooled.__code__.co_firstlineno + 1
    assert (proof.verdict, proof.line.partition(" ")[0]) == ("different", f"test_from_hlo.py:{line}")


def test_explicit_axes_arguments_that_nothing_reads_and_donated_ones():
    mesh = mesh_of(**GRID, explicit=True)
    x, placed = np.ones((8, 6), np.float32), [NamedSharding(mesh, P(*spec)) for spec in ("d", "t", "dt")]
    product = lambda x, _, w: (jnp.einsum("ij,kj->ik", x, w, out_sharding=P("d")), x + 1)  # noqa: E731
    with jax.set_mesh(mesh):
        assert gshard.prove(jax.jit(product, donate_argnums=0), *jax.device_put([x] * 3, placed))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_families(name):
    case = CASES[name]
    lowered = gshard.jit(case.function, mesh=case.jax_mesh).lower(*case.arguments)
    shardings = [named_sharding(lowered.mesh, s) for s in lowered.spmd.in_shardings]
    step = jax.jit(xla_function(lowered.program, lowered.mesh), in_shardings=shardings)
    proof = gshard.prove(step, *lowered.program.captured, *jax.tree.leaves(case.arguments))
    assert (proof.verdict == "different") == (name == "windows/pooling_stride_1'"), proof


def test_what_has_no_translation_is_refused_by_name_and_line():
    lowered = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(np.ones(3, np.float32))
    with pytest.raises(gshard.GShardError, match=r"custom call '\w*callback'(.|\n)*test_from_hlo.py:\d+"):
        partitioned(lowered)


def test_the_algorithm_of_a_product_is_kept():
    product = jax.jit(lambda x: lax.dot(x, x, precision="BF16_BF16_F32"))
    assert "BF16_BF16_F32" in str(partitioned(product.lower(np.ones((4, 4), np.float32))))


def test_the_persistent_cache_neither_answers_nor_keeps(tmp_path):
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    try:
        list(map(jax.config.update, names, (str(tmp_path), 0)))
        assert [len(partitioned(jax.jit(jnp.sin).lower(1.0)).eqns) for _ in "ab"] == [1, 1]
    finally:
        list(map(jax.config.update, names, before))
    assert not list(tmp_path.rglob("*"))
