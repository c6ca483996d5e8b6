"""XLA's bugs as they are. A test that fails here says that a workaround can go, or for which version it must stay."""

import re

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import lax

from gshard.core.mesh import Mesh
from gshard.core.xla_workarounds import (
    all_gather,
    all_to_all,
    opaque_for_slice,
    opaque_identity,
    ppermute,
    ragged_all_to_all,
    row_major,
    runnable,
    taken,
    update_window,
    with_initial,
)
from harness import AS_WRITTEN

# Two are gone in jaxlib 0.12; the workarounds stay for the versions before.
OLD = tuple(map(int, jaxlib.__version__.split(".")[:2])) < (0, 12)


def sines(f):
    return int(jax.jit(f).lower(jnp.ones(8)).compile().as_text().count(" sine("))


def test_a_barrier_does_not_keep_equal_computations_apart():
    assert sines(lambda x: jnp.sin(x) * jnp.sin(lax.optimization_barrier(x))) == (1 if OLD else 2)
    assert sines(lambda x: jnp.sin(x) * jnp.sin(opaque_identity([x], x)[0])) == 2


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_an_integer_slice_of_a_product_of_a_slice_loses_the_factor(dtype):
    def one(x, i, j, seen=lambda y: y):
        return lax.dynamic_slice_in_dim(seen(lax.dynamic_slice_in_dim(x, i, 4) * 3), j, 1)

    x = jnp.arange(16).astype(dtype)
    assert jax.jit(one)(x, 2, 1).tolist() == [3]
    assert jax.jit(lambda *a: one(*a, lambda y: opaque_for_slice(y, 0, 1)))(x, 2, 1).tolist() == [9]


def test_the_initial_value_of_a_reduction_over_one_element_is_dropped():
    x = jnp.ones((1, 3))
    assert jax.jit(lambda x: lax.reduce(x, jnp.float32(5), lax.add, (0,)))(x).tolist() == [1, 1, 1]

    def folded(x):
        return with_initial(lax.reduce(x, jnp.float32(0), lax.add, (0,)), jnp.float32(5), jnp.add, True)

    assert jax.jit(folded)(x).tolist() == [6, 6, 6]


def test_one_index_out_of_range_writes_what_lies_beside_a_slice():
    def scattered(x, start, i):
        return lax.dynamic_slice_in_dim(x, start, 4).at[i].set(99, mode="drop")

    def windowed(x, start, i):
        part = lax.dynamic_slice_in_dim(x, start, 4)
        return update_window(part, [jnp.clip(i, 0, 3)], [1], lambda there: 0 * there + 99, i < 4)

    x = jnp.arange(16)
    assert jax.jit(scattered)(x, 4, 9).tolist() == [4, 5, 6, 13 if OLD else 7]  # openxla/xla#49121
    assert jax.jit(scattered, compiler_options=AS_WRITTEN)(x, 4, 9).tolist() == [4, 5, 6, 7]
    assert jax.jit(windowed)(x, 4, 9).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("at", [[-7], [-1], [2], [5], [-7, 9]])
def test_one_position_out_of_range_reads_what_lies_beside_a_slice(at):
    x, wanted = jnp.arange(12), [3 + min(max(i, 0), 4) for i in at]

    def plain(x, start, i):
        return jnp.take(lax.dynamic_slice_in_dim(x, start, 5), i, mode="clip")

    def safe(x, start, i):
        return taken(lax.dynamic_slice_in_dim(x, start, 5), i, 0)

    errs = OLD and len(at) == 1 and not 0 <= at[0] < 5
    assert (jax.jit(plain)(x, 3, jnp.array(at)).tolist() != wanted) is errs  # openxla/xla#49121
    assert jax.jit(safe)(x, 3, jnp.array(at)).tolist() == wanted


def test_an_update_in_place_reads_what_it_has_overwritten():
    def moved(x):
        base = x + 1
        return lax.dynamic_update_slice(base, base[:3], (1, 0, 0)).reshape((1, 4, 1))

    x = np.arange(4, dtype=np.int32).reshape(4, 1, 1)
    assert np.ravel(jax.jit(moved)(x)).tolist() != [1, 1, 2, 3]  # openxla/xla#49176
    assert np.ravel(jax.jit(moved, compiler_options=AS_WRITTEN)(x)).tolist() == [1, 1, 2, 3]


def test_a_transform_before_a_gather_is_given_an_order_that_it_refuses():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((4, 8, 8), jnp.complex64)

    def compiled(transform):
        def gathered(x):
            return lax.all_gather(transform(x), "i", axis=1, tiled=True)

        spec = jax.sharding.PartitionSpec(None, "i", None)
        out = jax.sharding.PartitionSpec()
        return jax.jit(jax.shard_map(gathered, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))

    with pytest.raises(Exception, match="IsMonotonicWithDim0Major"):
        compiled(jnp.fft.fft)(x).block_until_ready()
    compiled(lambda x: row_major(jnp.fft.fft, x))(x).block_until_ready()


def sent_on(exchange, mesh):
    """Two all-to-alls, of which the second sends on what the first has received, padded in another place."""
    spec = jax.sharding.PartitionSpec

    def local(x):
        parts = jnp.moveaxis(jnp.pad(x, ((0, 0), (0, 5), (0, 0))).reshape(3, 6, 1, 7), 1, 0)
        whole = exchange(parts).reshape(18, 1, 7)[:17]
        again = exchange(jnp.pad(whole, ((0, 1), (0, 0), (0, 0))).reshape(6, 3, 1, 7))
        return jnp.moveaxis(again, 0, 1).reshape(3, 6, 7)

    return jax.jit(
        jax.shard_map(local, mesh=mesh.jax_mesh, in_specs=spec(mesh.atoms), out_specs=spec(mesh.atoms), check_vma=False)
    )


def test_an_all_to_all_of_what_another_has_sent_does_not_compile():
    mesh = Mesh.of({"x": 3, "y": 2})
    x = jnp.arange(18 * 7).reshape(18, 1, 7)

    def plain(parts):
        return lax.all_to_all(parts, mesh.atoms, split_axis=0, concat_axis=0, tiled=True)

    with pytest.raises(jax.errors.JaxRuntimeError, match="operands with different shapes"):
        sent_on(plain, mesh)(x)
    found = sent_on(lambda parts: all_to_all(parts, mesh.atoms, 0, 0), mesh)(x)
    want = np.pad(np.asarray(x), ((0, 0), (0, 5), (0, 0)))
    want[17] = 0
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(("split", "joined"), [(0, 0), (0, 1), (1, 0), (2, 1), (1, 1)])
def test_all_to_all_with_a_dimension_in_front_is_the_same(split, joined):
    mesh, spec = Mesh.of({"x": 3, "y": 2}), jax.sharding.PartitionSpec
    x = jnp.arange(36 * 6 * 12).reshape(36, 6, 12) - 500

    def mapped(f):
        axes = spec(mesh.atoms)
        return jax.jit(jax.shard_map(f, mesh=mesh.jax_mesh, in_specs=axes, out_specs=axes, check_vma=False))(x)

    found = mapped(lambda part: all_to_all(part, mesh.atoms, split, joined))
    np.testing.assert_array_equal(
        found, mapped(lambda part: lax.all_to_all(part, mesh.atoms, split_axis=split, concat_axis=joined, tiled=True))
    )


PAIRS = [(0, 1), (1, 0)]
MOVES = {
    "all-gather": (lambda x: lax.all_gather(x, "x", axis=0, tiled=True), lambda x: all_gather(x, ("x",), 0)),
    "all-to-all": (lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), lambda x: all_to_all(x, ("x",), 0, 0)),
    "collective-permute": (lambda x: lax.ppermute(x, "x", PAIRS), lambda x: ppermute(x, ["x"], PAIRS)),
}


@pytest.mark.parametrize(("dtype", "plain", "ours"), [("bfloat16", "f32", "u16"), ("float8_e5m2", "f16", "u8")])
@pytest.mark.parametrize("kind", MOVES)
def test_collectives_that_only_move_elements_convert_narrow_floats(kind, dtype, plain, ours):
    mesh, spec = Mesh.of({"x": 2}).jax_mesh, jax.sharding.PartitionSpec("x")
    width = 8 * jnp.dtype(dtype).itemsize
    bits = np.arange(2**width, dtype=f"uint{width}")  # all of them, those of infinities and NaNs included
    x = bits.view(jnp.dtype(dtype))
    for move, sent in zip(MOVES[kind], (plain, ours), strict=True):
        mapped = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        (types,) = re.findall(rf"= (.*) {kind}\(", mapped.lower(x).compile().as_text())
        assert re.findall(r"\w+(?=\[)", types)[0] == sent
        found = np.asarray(mapped(x))
        want = {"all-gather": np.tile(x, 2), "all-to-all": x.reshape(2, 2, -1).swapaxes(0, 1).ravel()}
        wanted = want.get(kind, np.roll(x, len(x) // 2))
        numbers = ~np.isnan(wanted.astype(np.float32))
        np.testing.assert_array_equal(found[numbers].view(bits.dtype), wanted[numbers].view(bits.dtype))
        assert np.isnan(found[~numbers].astype(np.float32)).all()


def test_a_ragged_all_to_all_does_not_compile():
    """Ours does: chunks of other sizes for each pair of devices, some empty, and the output stays between them."""
    count, rng = 4, np.random.default_rng(0)
    sizes = rng.integers(0, 4, (count, count)).astype(np.int32)  # [sender, receiver]
    starts, targets = np.cumsum(sizes, 1, np.int32) - sizes, np.cumsum(sizes, 0, np.int32) - sizes + 1
    x = rng.normal(size=(count, 16, 3)).astype(np.float32)
    output = rng.normal(size=(count, 20, 3)).astype(np.float32)
    want = output.copy()
    for sender, receiver in np.ndindex(count, count):
        size, start, target = (table[sender, receiver] for table in (sizes, starts, targets))
        want[receiver, target : target + size] = x[sender, start : start + size]
    mesh = jax.make_mesh((count,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(exchange):
        part = lambda *arrays: exchange(*(y[0] for y in arrays))[None]  # noqa: E731
        specs = (jax.P("a"),) * 6
        mapped = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=jax.P("a"), check_vma=False)
        return jax.jit(mapped)(x, output, starts, sizes, targets, sizes.T)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"UNIMPLEMENTED|ragged-all-to-all"):
        run(lambda *arrays: lax.ragged_all_to_all(*arrays, axis_name="a"))
    np.testing.assert_array_equal(run(lambda *arrays: ragged_all_to_all(*arrays, ("a",))), want)


def test_a_program_that_reads_empty_arrays_only_does_not_compile():
    mesh, whole = Mesh.of(3).jax_mesh, jax.sharding.PartitionSpec()
    empty = jnp.zeros((0, 8, 2), jnp.float16), jnp.zeros((0, 12, 5)), jnp.ones(3)
    mapped = jax.shard_map(
        lambda a, b, unread: (a + 1, b.sum() + 2, jnp.arange(4)),
        mesh=mesh,
        in_specs=(whole,) * 3,
        out_specs=(whole,) * 3,
        check_vma=False,
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="GlobalToLocalShape"):
        jax.jit(mapped)(*empty)
    found = jax.jit(lambda *xs: tuple(runnable(jax.make_jaxpr(mapped)(*empty))(*xs)))(*empty)
    assert found[0].shape == (0, 8, 2)
    assert found[1] == 2
    assert found[2].tolist() == [0, 1, 2, 3]
