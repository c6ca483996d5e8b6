"""Marks mean what they say: which device holds which part is checked device by device, on paper and on devices."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import shard
from gshard.core.errors import ShardingError
from gshard.core.mark import Mark, mark_of_split, resolve
from gshard.core.mesh import Mesh

MESHES = (Mesh.abstract(devices=8), Mesh.abstract(a=2, b=6), Mesh.abstract(a=3, b=2, c=2), Mesh.abstract(a=1, b=5))


def parts_held(dims, mesh):
    """For each device, which part of an array it holds, counted along each dimension."""
    held = []
    for at in itertools.product(*(range(n) for n in mesh.atom_sizes.values())):
        place = dict(zip(mesh.atoms, at, strict=True))
        part = []
        for atoms in dims:
            number = 0
            for atom in atoms:
                number = number * mesh.atom_sizes[atom] + place[atom]
            part.append(number)
        held.append(tuple(part))
    return held


def assigned(ids, mesh):
    """The same as the device assignment says it: id ``i`` stands for the ``i``-th run of consecutive devices."""
    part_of = {int(i): tuple(map(int, np.argwhere(ids == i)[0])) for i in ids.flat}
    copies = mesh.size // ids.size
    return [part_of[device // copies] for device in range(mesh.size)]


def assignment(ids):
    return Mark(ids=tuple(map(int, ids.ravel())), ids_shape=ids.shape)


@st.composite
def affine_assignments(draw):
    """Device ids that follow the atoms: a mesh's major devices, its axes in another order and merged."""
    mesh = draw(st.sampled_from(MESHES))
    used = draw(st.integers(0, len(mesh.atoms)))
    sizes = [mesh.atom_sizes[a] for a in mesh.atoms[:used]]
    order = draw(st.permutations(range(used)))
    rank = draw(st.integers(0 if not used else 1, 3))
    dims = sorted(draw(st.lists(st.integers(0, rank - 1), min_size=used, max_size=used))) if rank else []
    shape = [math.prod(sizes[a] for a, d in zip(order, dims, strict=True) if d == k) for k in range(rank)]
    return mesh, np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(shape)


@given(affine_assignments())
def test_a_device_assignment_puts_every_part_where_it_says(drawn):
    mesh, ids = drawn
    demand = resolve(assignment(ids), mesh, (12,) * ids.ndim, "")
    assert parts_held(demand.dims, mesh) == assigned(ids, mesh)
    assert demand.open == (False,) * ids.ndim


@given(st.sampled_from(MESHES), st.data())
def test_any_order_of_devices_is_read_as_it_is(mesh, data):
    """Random orders of the devices: on the mesh in the order that is found, every part is where it should be."""
    ids = np.array(data.draw(st.permutations(range(mesh.size))))
    rows = data.draw(st.sampled_from([n for n in range(1, mesh.size + 1) if mesh.size % n == 0]))
    ids = ids.reshape(rows, -1)
    demand = resolve(assignment(ids), mesh, (24, 24), "")
    held = parts_held(demand.dims, mesh)
    found = mesh.reordered(demand.order)
    wanted = assigned(ids, mesh)
    assert [wanted[device] for device in found.order or range(mesh.size)] == held
    again = resolve(assignment(ids), found, (24, 24), "")  # read on the mesh in that order, it follows the axes
    assert again.order == found.order
    assert parts_held(again.dims, found) == held


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_fewer_partitions_than_devices_lie_on_consecutive_devices(mesh):
    """``split`` and ``shard`` with ``arange`` agree wherever the number of parts is a product of major atoms."""
    for used in range(len(mesh.atoms) + 1):
        parts = mesh.count(mesh.atoms[:used])
        by_split = resolve(mark_of_split(1, parts), mesh, (5, 7), "")
        by_ids = resolve(assignment(np.arange(parts).reshape(1, parts)), mesh, (5, 7), "")
        assert by_split == by_ids
        copies = mesh.size // parts
        assert parts_held(by_split.dims, mesh) == [(0, device // copies) for device in range(mesh.size)]


def test_axes_by_name():
    mesh = Mesh.abstract(a=2, b=6, one=1)
    b = mesh.atoms_of["b"]
    assert resolve(Mark(spec=(("b", "a"),)), mesh, (3, 4), "").dims == ((*b, "a"), ())
    assert resolve(Mark(spec=(None, "b")), mesh, (3, 4), "").dims == ((), b)
    assert resolve(Mark(spec=("one", "b.1")), mesh, (3, 4), "").dims == ((), ("b.1",))
    assert resolve(mark_of_split(1, ("a", "b")), mesh, (3, 4), "").dims == ((), ("a", *b))
    open_one = resolve(Mark(spec=(P.UNCONSTRAINED, "a")), mesh, (3, 4), "")
    assert open_one.open == (True, False)
    assert open_one.dims == ((), ("a",))


def test_axes_of_another_mesh_over_the_same_devices():
    """A constraint of a mesh ``2 x 4`` is understood on one axis of 8, by the strides of its axes."""
    mark = Mark(spec=("y", "x"), axes=(("x", 2), ("y", 4)))
    mesh = Mesh.abstract(devices=8)
    d0, d1, d2 = mesh.atoms
    assert resolve(mark, mesh, (4, 4), "").dims == ((d1, d2), (d0,))
    with pytest.raises(ShardingError):
        resolve(Mark(spec=("x",), axes=(("x", 3), ("y", 4))), mesh, (4,), "")


def test_dimensions_that_vmap_adds_are_open():
    mark = Mark((2,), batch_dims=(1, 0))
    demand = resolve(mark, Mesh.abstract(a=2), (7, 4, 6), "")
    assert demand.dims == ((), ("a",), ())
    assert demand.open == (True, False, True)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"in_shardings": P("nope")}, "no axis 'nope'"),
        ({"in_shardings": P("data", "data")}, "axis 'data' splits dimensions 0 and 1"),
        ({"in_shardings": P(None, None, "data")}, "names 3 dimensions"),
        ({"in_shardings": (P("data"), P("data"))}, "in_shardings has 2 entries, and the function has 1 argument"),
        ({"out_shardings": P("nope")}, "no axis 'nope'"),
        ({"out_shardings": "dat"}, "no axis 'dat'(.|\n)*Did you mean 'data'"),
        ({"out_shardings": 3}, "int is no sharding"),
    ],
    ids=str,
)
def test_bad_shardings_of_arguments_and_results(settings, what, mesh_2x4):
    with pytest.raises(ShardingError, match=what):
        gshard.jit(lambda tokens: tokens * 2, mesh=mesh_2x4, **settings)(jnp.ones((4, 6)))


def holders(x):
    """Which device holds which slice of an array."""
    return {s.device.id: tuple(range(n)[i] for i, n in zip(s.index, x.shape)) for s in x.addressable_shards}


def test_devices_hold_what_jax_itself_would_give_them():
    """The same names on a mesh of permuted devices: every device holds the slice that NamedSharding gives it."""
    devices = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]].reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    x = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    for spec in (P("data", "model"), P(("model", "data")), P(None, "data"), P("model", None)):
        out = gshard.jit(lambda x, spec=spec: shard(x, spec) * 1, mesh=mesh)(x)
        wanted = NamedSharding(mesh, spec)
        assert holders(out) == holders(jax.device_put(x, wanted))
        assert out.sharding.is_equivalent_to(wanted, 2)


# A bare ``PartitionSpec`` in a function means the mesh of ``gshard.jit``, where no mesh is set.
X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
PLAN_MESH = gshard.Mesh.abstract(data=4, model=2)


def mark(x, *spec):
    return lax.with_sharding_constraint(x, P(*spec))


@jax.custom_vjp
def sine(x):
    return jnp.sin(mark(x, "data"))


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (mark(jnp.cos(x) * g, "data"),))

# Each with the sharding of its result.
PROGRAMS = {
    "constraint": (lambda x: mark(x, "data") * 2, P("data")),
    "out_shardings of a nested jit": (lambda x: jax.jit(jnp.sin, out_shardings=P("data"))(x), P("data")),
    "in_shardings of a nested jit": (lambda x: jax.jit(jnp.sin, in_shardings=P("data"))(x), P("data")),
    "device_put": (lambda x: jax.device_put(x, P("data")) * 2, P("data")),
    "scan": (lambda x: lax.scan(lambda c, _: (mark(jnp.sin(c), "data"), None), x, length=2)[0], P("data")),
    "vmap": (jax.vmap(lambda r: mark(r, "model") * 2), P(None, "model")),
    "custom_vjp": (jax.grad(lambda x: jnp.sum(sine(x))), P("data")),
    "shard_map": (lambda x: jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))(x), P("data")),
    "nested gshard.jit": (lambda x: gshard.jit(lambda x: mark(x, "data") * 2, mesh=PLAN_MESH)(x) + 1, P("data")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bare_spec_is_over_the_mesh_of_jit(name):
    f, expected = PROGRAMS[name]
    plan = gshard.jit(f, mesh=PLAN_MESH).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).plan
    assert plan.mesh.spec_of(plan.leave[0].dims) == expected


def test_calls_with_arguments_placed_in_any_way():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    run = gshard.jit(lambda x: sine(mark(jax.device_put(x, P(None, "model")), "data")), mesh=mesh)
    around = [run, jax.jit(lambda x: run(x) + 0), jax.jit(jax.grad(lambda x: jnp.sum(run(x))))]
    for place in (P(), P("data"), P(None, "model"), P("model", "data")):
        x = jax.device_put(X, NamedSharding(mesh, place))
        for f, right in zip(around, (np.sin(X), np.sin(X), np.cos(X)), strict=True):
            np.testing.assert_allclose(f(x), right, rtol=1e-5, atol=1e-6)
    for f in around:  # of no mesh
        assert f(X).sharding.spec == P("data")


def test_a_mesh_that_is_set_counts():
    run = gshard.jit(lambda x: mark(x, "rows") * 2, mesh={"data": 8})
    with pytest.raises(ValueError, match="rows"):
        run(X)
    with jax.set_mesh(jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))):
        assert run(X).sharding.spec == P("data")
    assert jax.sharding.get_abstract_mesh().empty


def test_a_function_without_bare_specs_sees_no_mesh():
    seen = []

    def f(x):
        seen.append(jax.sharding.get_abstract_mesh().empty)
        other = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        return jax.shard_map(jnp.sin, mesh=other, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)

    np.testing.assert_allclose(gshard.jit(f, mesh={"data": 8})(X), np.sin(X), rtol=1e-6)
    assert seen == [True]
