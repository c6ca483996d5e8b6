"""Exchanges of tiles in rounds: the same bits, in no more bytes than a device lacks."""

import functools
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.comm.reshard import plan_reshard, reshard_bytes
from gshard.comm.route import pairs
from gshard.comm.steps import bytes_sent, exchange, is_exchange, is_of_tiles, rounds, run
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.device.network import StepTimes
from laws.test_reshard_any import move, parts, shardings
from simulated import simulate_function

MESHES = Mesh.abstract(a=2, b=2, c=2), Mesh.abstract(a=4, b=2), Mesh.abstract(a=4, b=3)


def exchanges(mesh, rank):
    finished = [s for s in shardings(mesh, rank) if not s.unreduced]
    found = []
    for source, target in itertools.permutations(finished, 2):
        if set(source.atoms) == set(target.atoms):
            steps = plan_reshard(source, target, (mesh.size**2,) * rank, 4, mesh)
            found += [steps[0]] if len(steps) == 1 and is_exchange(steps[0], mesh) else []
    return found


def test_three_dimensions_change_places(rng):
    mesh = Mesh.abstract(a=4, b=2, c=2, d=2)
    (a, e), b, c, d = mesh.atoms_of["a"], "b", "c", "d"
    for source, target in (
        (((a, e), (b,), (c, d)), ((b,), (c, d), (e, a))),
        (((a, e), (), (b, c)), ((b,), (e, c), (a,))),
    ):
        x = rng.integers(-99, 99, (16, 32, 16)).astype(np.int32)
        steps = plan_reshard(Sharding(source), Sharding(target), x.shape, 4, mesh)
        assert any(is_exchange(step, mesh) for step in steps)
        move(x, Sharding(source), Sharding(target), mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_element_is_sent_once_in_few_rounds(mesh):
    shape = (mesh.size**2,) * 2
    for step in exchanges(mesh, 2):
        found = exchange(step.before.dims, step.after.dims, mesh)
        messages = found.messages()
        assert len(messages) == rounds(step, mesh) < mesh.count(found.atoms).bit_length()
        for chunks in messages:  # every device once on either side
            assert len({p.source for p in chunks}) == len({p.receiver for p in chunks}) == mesh.count(found.atoms)
        part = int(np.prod(step.before.local_shape(mesh, shape))) * 4
        assert bytes_sent(step, shape, 4, mesh) == part


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.bool_, np.complex64])
def test_bits_are_kept(dtype, rng):
    mesh = MESHES[1]
    x, y = mesh.atoms_of["a"], mesh.atoms_of["b"]
    (step,) = plan_reshard(Sharding((x, y)), Sharding((y, x)), (8, 16), 4, mesh)
    whole = rng.standard_normal((8, 16))
    whole[::3, ::5], whole[1::3, ::5], whole[2::3, ::5] = np.nan, -0.0, np.inf
    whole = whole.astype(dtype)
    (moved,) = simulate_function(
        lambda part: run(step, part, whole.shape, mesh), mesh.atom_sizes, parts(whole, step.before, mesh)
    )
    assert moved.tobytes() == parts(whole, step.after, mesh).tobytes()


def test_on_devices():
    x = jnp.arange(32 * 16, dtype=jnp.float32).reshape(32, 16) - 100
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jitted = gshard.jit(lambda x: x.T * -1, mesh=mesh, in_shardings=P("a", "b"), out_shardings=P("a", "b"))
    np.testing.assert_array_equal(jitted(x), -x.T)
    sent = jitted.lower(x).spmd.collectives
    assert {c.kind for c in sent} == {"collective_permute"}
    assert sum(c.total_bytes for c in sent) == x.nbytes // 8, "each element once"


@pytest.mark.parametrize(("before", "after"), [(("a", "b"), ("b", "a")), (("a",), (None, ("a", "b")))])
def test_keys_of_random_numbers_change_places(before, after):
    keys = jax.random.split(jax.random.key(3), (8, 8, 4))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    moved = gshard.jit(lambda k: gshard.shard(gshard.shard(k, P(*before)), P(*after)), mesh=mesh)(keys)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_who_sends_to_whom_is_what_the_rounds_say():
    """Along other atoms of a larger mesh, too, which stay where they are."""
    mesh = Mesh.abstract(z=3, a=4, b=2)
    a, b = mesh.atoms_of["a"], mesh.atoms_of["b"]
    found = exchange((a, b, ("z",)), (b, a, ("z",)), mesh)
    senders, receivers = found.ends(mesh)
    expected = [
        ends
        for chunks in found.messages()
        for ends in pairs([(p.source, p.receiver) for p in chunks], found.atoms, mesh)
    ]
    assert sorted(zip(senders.tolist(), receivers.tolist(), strict=True)) == sorted(expected)


def test_rounds_are_timed_as_messages_one_after_the_other():
    mesh = MESHES[1]
    x, y = mesh.atoms_of["a"], mesh.atoms_of["b"]
    (step,) = plan_reshard(Sharding((x, y)), Sharding((y, x)), (64, 64), 4, mesh)
    machine = Machine.of("h100:1x8")
    (switch,) = machine.network
    taken = StepTimes(machine).seconds(step, (8, 8), 4, mesh)
    assert 1.5 * switch.latency < taken < 2.5 * switch.latency, "two messages, in which a tile or two stay at home"


# All-to-alls of tiles: the same numbers, and no more bytes than what each device lacks.
ALL = ("a", "b")
TILED = Mesh.abstract(a=2, b=2, c=2), Mesh.abstract(a=2, b=3)


@functools.cache
def tiled_pairs(mesh, rank=3, most=1000):
    """Pairs of shardings with one all-to-all of tiles between them, found among at most ``most`` pairs."""
    shape = (mesh.size,) * rank
    finished = [s for s in shardings(mesh, rank) if not s.unreduced]
    every = list(itertools.permutations(finished, 2))
    found = []
    for one, other in random.Random(0).sample(every, min(most, len(every))):
        steps = plan_reshard(one, other, shape, 4, mesh)
        if len(steps) == 1 and is_of_tiles(steps[0]):
            found.append((one, other))
    return found


def lacked(source, target, n, mesh):
    """Elements of a cube of ``n`` that the device which lacks most of its part has to get."""
    have, want = (parts(np.arange(n**3).reshape(n, n, n), s, mesh) for s in (source, target))
    return max(len(np.setdiff1d(b, a)) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize(("mesh", "tiled"), [*((m, False) for m in MESHES), *((m, True) for m in TILED)])
def test_every_element_comes_where_it_belongs(mesh, tiled, rng):
    found = tiled_pairs(mesh) if tiled else [(step.before, step.after) for step in exchanges(mesh, 2)]
    assert len(found) >= (21 if tiled else 4)
    for source, target in random.Random(1).sample(found, 8 if tiled else 4):
        shape = tuple(mesh.size * k for k in ((1, 2, 3) if tiled else (1, 2)))
        move(rng.integers(-99, 99, shape).astype(np.int32), source, target, mesh)


@pytest.mark.parametrize("most", [1000, pytest.param(10**9, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("mesh", TILED)
def test_no_more_is_sent_than_a_device_lacks(mesh, most):
    n = mesh.size
    for source, target in tiled_pairs(mesh, most=most):
        assert reshard_bytes(source, target, (n, n, n), 4, mesh) == 4 * lacked(source, target, n, mesh)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.bfloat16, jnp.complex64])
def test_on_devices_of_tiles(dtype):
    x = jnp.arange(16 * 16 * 8).reshape(16, 16, 8).astype(dtype)
    tiles = lambda x: gshard.shard(gshard.shard(x, P(("a", "b"))), P(None, "a", "b"))  # noqa: E731
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jitted = gshard.jit(tiles, mesh=mesh)
    np.testing.assert_array_equal(jitted(x), x)
    (sent,) = jitted.lower(x).spmd.collectives
    assert (sent.kind, sent.bytes) == ("all_to_all", x.nbytes // 8 * 7 // 8)


@pytest.mark.parametrize("shape, before, after", [
    ((8, 24, 5), P(ALL), P(None, ALL)),  # one row on each device
    ((6, 3, 8), P(None, None, ALL), P(ALL)),  # to one row, padded
    ((16, 2, 8), P(ALL), P(None, None, ALL)),  # to one column
])  # fmt: skip
def test_what_is_nothing_but_parts_is_exchanged_as_a_dimension_of_its_own(rng, shape, before, after):
    """In front, where no compiler pads it; the values are those of the array."""

    def f(x):
        return gshard.shard(jnp.sin(gshard.shard(x, before)), after)

    x = rng.standard_normal(shape).astype(np.float32)
    made = gshard.jit(f, mesh=jax.make_mesh((4, 2), ("a", "b")))
    (exchange,) = re.findall(r"all_to_all\[[^\]]*\]", str(made.lower(x).spmd.jaxpr))
    assert "split_axis=0" in exchange
    assert "concat_axis=0" in exchange
    np.testing.assert_allclose(made(x), np.sin(x), rtol=1e-6)
