"""A mesh that ``jax.set_mesh`` has set says which mesh is meant where none is given, and disturbs no other.

The order of a program's devices may differ from that of the mesh that is set: by marks with device ids, by arguments
in an order of their own, by the mesh that ``gshard.jit`` is given.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from checked_calls import called
from placed import PLACES, in_every_way, mesh_of
from small_programs import RING

X = np.random.default_rng(0).integers(-9, 9, (8, 8)).astype(np.int32)
SET = {"Auto": {"a": 2, "b": 4}, "Explicit": {"a": 2, "b": 4, "explicit": True}}
REVERSED = range(7, -1, -1)


def plus(x):
    return gshard.split(x, 0, 8) + 1


def on_a_ring(x):
    return gshard.shard(x, RING) + 1


MADE = {
    "the mesh that is set": lambda mesh: gshard.jit(plus),
    "the same mesh": lambda mesh: gshard.jit(plus, mesh=mesh),
    "other axes": lambda mesh: gshard.jit(plus, mesh=8),
    "devices in another order": lambda mesh: gshard.jit(plus, mesh=mesh_of(order=REVERSED, a=2, b=4)),
    "marks with device ids": lambda mesh: gshard.jit(on_a_ring),
    "marks with device ids, the same mesh": lambda mesh: gshard.jit(on_a_ring, mesh=mesh),
}


@pytest.mark.parametrize("which", SET)
@pytest.mark.parametrize("made", MADE)
def test_it_disturbs_no_function(made, which):
    mesh = mesh_of(**SET[which])
    jitted = MADE[made](mesh)
    with jax.set_mesh(mesh):
        for got in in_every_way(jitted, (X,), mesh, ["numpy", "numpy", "uncommitted", "whole"]):
            np.testing.assert_array_equal(got, X + 1)


@pytest.mark.parametrize("way", [
    "reversed, rows", "reversed, over the first axis", "shuffled, both", "turned, rows", "half, rows",
    "another device",
])  # fmt: skip
def test_an_argument_elsewhere_is_moved_as_without(way):
    mesh = mesh_of(a=2, b=4)
    jitted = gshard.jit(plus, mesh=mesh)
    x = PLACES[way](X, mesh)
    for _ in range(3):
        called(jitted, (x,), X + 1, where="no mesh is set")
        with jax.set_mesh(mesh):
            called(jitted, (x,), X + 1, where="a mesh is set")


def test_meshes_are_set_in_turn():
    jitted = gshard.jit(lambda x: (gshard.split(x, 0, 8) * 2, jnp.cumsum(x, 0)))
    meshes = [mesh_of(a=2, b=4), mesh_of(d=8), mesh_of(order=REVERSED, a=2, b=4), mesh_of(explicit=True, a=2, b=4)]
    for mesh in [*meshes, *meshes, *reversed(meshes)]:
        with jax.set_mesh(mesh):
            double, sums = called(jitted, (X,), (X * 2, np.cumsum(X, 0, dtype=np.int32)), where=str(mesh))
        assert set(double.sharding.device_set) == set(mesh.devices.flat)
        assert sums.shape == X.shape


@pytest.mark.parametrize("kinds", [("auto", "explicit"), ("explicit", "auto")])
def test_the_types_of_its_axes_are_those_of_the_results(kinds):
    """One function over meshes that differ in the types of their axes alone, without a mesh that is set."""

    def squares(x):
        return jnp.sin(gshard.split(x, 0, "a")) ** 2

    meshes = {"auto": mesh_of(a=8), "explicit": mesh_of(a=8, explicit=True)}
    x = np.linspace(0.1, 1, 16, dtype=np.float32)
    typed = jax.device_put(x, jax.NamedSharding(meshes["explicit"], jax.P("a")))
    want = jax.vjp(squares, x)[1](x)[0]
    for kind in (*kinds, *kinds):
        jitted = gshard.jit(squares, mesh=meshes[kind])
        for argument in (typed, x, typed):
            result, backward = jax.vjp(jitted, argument)
            np.testing.assert_allclose(result, squares(x), rtol=1e-6)
            explicit = bool(jax.typeof(result).sharding.mesh.explicit_axes)
            assert explicit == (argument is typed)
            for cotangent in (argument, x):
                np.testing.assert_allclose(backward(cotangent)[0], want, rtol=1e-6)
