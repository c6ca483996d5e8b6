"""Exchanges of tiles in rounds: the same bits, in no more bytes than a device lacks."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.comm.reshard import plan_reshard
from gshard.comm.route import pairs
from gshard.comm.steps import Step, bytes_sent, exchange, is_exchange, rounds, run
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.device.network import StepTimes
from gshard.simulator.simulate import simulate_function
from laws.test_reshard_any import move, parts, shardings

MESHES = Mesh.abstract(a=2, b=2, c=2), Mesh.abstract(a=4, b=2), Mesh.abstract(a=4, b=3)


def exchanges(mesh: Mesh, rank: int) -> list[Step]:
    """Steps that are an exchange, each all that its reshard needs."""
    finished = [s for s in shardings(mesh, rank) if not s.unreduced]
    found = []
    for source, target in itertools.permutations(finished, 2):
        if set(source.atoms) == set(target.atoms):
            steps = plan_reshard(source, target, (mesh.size**2,) * rank, 4, mesh)
            found += [steps[0]] if len(steps) == 1 and is_exchange(steps[0], mesh) else []
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_element_comes_where_it_belongs(mesh: Mesh, rng: np.random.Generator) -> None:
    found = exchanges(mesh, 2)
    assert len(found) >= 4
    for step in random.Random(1).sample(found, 4):
        shape = tuple(mesh.size * k for k in (1, 2))
        move(rng.integers(-99, 99, shape).astype(np.int32), step.before, step.after, mesh, rng)


def test_three_dimensions_change_places(rng: np.random.Generator) -> None:
    mesh = Mesh.abstract(a=4, b=2, c=2, d=2)
    (a, e), b, c, d = mesh.atoms_of["a"], "b", "c", "d"
    for source, target in (
        (((a, e), (b,), (c, d)), ((b,), (c, d), (e, a))),
        (((a, e), (), (b, c)), ((b,), (e, c), (a,))),
    ):
        x = rng.integers(-99, 99, (16, 32, 16)).astype(np.int32)
        steps = plan_reshard(Sharding(source), Sharding(target), x.shape, 4, mesh)
        assert any(is_exchange(step, mesh) for step in steps)
        move(x, Sharding(source), Sharding(target), mesh, rng)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_element_is_sent_once_in_few_rounds(mesh: Mesh) -> None:
    shape = (mesh.size**2,) * 2
    for step in exchanges(mesh, 2):
        found = exchange(step.before.dims, step.after.dims, mesh)
        messages = found.messages()
        assert len(messages) == rounds(step, mesh) < mesh.count(found.atoms).bit_length()
        for chunks in messages:  # every device once on either side
            assert len({p.source for p in chunks}) == len({p.receiver for p in chunks}) == mesh.count(found.atoms)
        part = int(np.prod(step.before.local_shape(mesh, shape))) * 4
        assert bytes_sent(step, shape, 4, mesh) == part


def test_unequal_parts_go_another_way(rng: np.random.Generator) -> None:
    mesh = MESHES[1]
    x, y = mesh.atoms_of["a"], mesh.atoms_of["b"]
    for shape in ((8, 7), (5, 8), (6, 8), (3, 1), (0, 8)):
        move(rng.integers(-99, 99, shape).astype(np.int32), Sharding((x, y)), Sharding((y, x)), mesh, rng)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.bool_, np.complex64])
def test_bits_are_kept(dtype: np.dtype, rng: np.random.Generator) -> None:
    mesh = MESHES[1]
    x, y = mesh.atoms_of["a"], mesh.atoms_of["b"]
    (step,) = plan_reshard(Sharding((x, y)), Sharding((y, x)), (8, 16), 4, mesh)
    whole = rng.standard_normal((8, 16))
    whole[::3, ::5], whole[1::3, ::5], whole[2::3, ::5] = np.nan, -0.0, np.inf
    whole = whole.astype(dtype)
    (moved,) = simulate_function(
        lambda part: run(step, part, whole.shape, mesh), mesh.atom_sizes, parts(whole, step.before, mesh, rng)
    )
    assert moved.tobytes() == parts(whole, step.after, mesh, rng).tobytes()


def test_on_devices() -> None:
    x = jnp.arange(32 * 16, dtype=jnp.float32).reshape(32, 16) - 100
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jitted = gshard.jit(lambda x: x.T * -1, mesh=mesh, in_shardings=P("a", "b"), out_shardings=P("a", "b"))
    np.testing.assert_array_equal(jitted(x), -x.T)
    sent = jitted.lower(x).spmd.collectives
    assert {c.kind for c in sent} == {"collective_permute"}
    assert sum(c.total_bytes for c in sent) == x.nbytes // 8, "each element once"


def test_keys_of_random_numbers_change_places() -> None:
    keys = jax.random.split(jax.random.key(3), (8, 8))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    moved = gshard.jit(lambda k: gshard.shard(gshard.shard(k, P("a", "b")), P("b", "a")), mesh=mesh)(keys)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_who_sends_to_whom_is_what_the_rounds_say() -> None:
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


def test_rounds_are_timed_as_messages_one_after_the_other() -> None:
    mesh = MESHES[1]
    x, y = mesh.atoms_of["a"], mesh.atoms_of["b"]
    (step,) = plan_reshard(Sharding((x, y)), Sharding((y, x)), (64, 64), 4, mesh)
    machine = Machine.of("h100:1x8")
    (switch,) = machine.network
    taken = StepTimes(machine).seconds(step, (8, 8), 4, mesh)
    assert 1.5 * switch.latency < taken < 2.5 * switch.latency, "two messages, in which a tile or two stay at home"
