"""Meshes: axes become prime atoms in the same device order, and meshes that make no sense are refused."""

import enum
import math
import warnings

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from gshard.core.errors import GShardError, MeshError
from gshard.core.mark import Mark, cut, order_for, permutation, positions_of_parts, resolve, table_of_ids
from gshard.core.mesh import Mesh, prime_factors


@given(st.integers(1, 5000))
def test_prime_factors_multiply_to_the_number(n):
    factors = prime_factors(n)
    assert math.prod(factors) == n
    assert list(factors) == sorted(factors)
    assert all(p > 1 and all(p % q for q in range(2, p)) for p in factors)


@pytest.mark.parametrize(
    ("axes", "atoms"),
    [
        ({"data": 2}, {"data": 2}),
        ({"data": 8}, {"data.0": 2, "data.1": 2, "data.2": 2}),
        ({"a": 6, "b": 5}, {"a.0": 2, "a.1": 3, "b": 5}),
        ({"a": 1, "b": 4}, {"b.0": 2, "b.1": 2}),
        ({"a": 1}, {}),
    ],
    ids=str,
)
def test_axes_become_prime_atoms(axes, atoms):
    mesh = Mesh.abstract(**axes)
    assert mesh.atom_sizes == atoms
    assert mesh.atoms == tuple(atoms)
    assert mesh.size == math.prod(axes.values())
    assert [a for own in mesh.atoms_of.values() for a in own] == list(atoms), "every atom belongs to one axis, in order"
    for name, size in axes.items():
        assert mesh.count(mesh.atoms_of[name]) == size
        assert mesh.format_atoms(mesh.atoms_of[name]) == (name if size > 1 else "")


def test_an_axis_named_like_an_atom_of_another_is_no_atom_of_it():
    """``x.y`` looks like an atom of ``x``; who belongs where does not depend on names."""
    mesh = Mesh.abstract(**{"x": 4, "x.y": 2})
    assert mesh.atoms_of == {"x": ("x.0", "x.1"), "x.y": ("x.y",)}


def test_axes_whose_atoms_would_have_one_name_are_kept_apart():
    """An axis ``x.0`` beside an axis ``x`` of size 4: three atoms, none of them lost."""
    mesh = Mesh.abstract(**{"x": 4, "x.0": 2})
    assert len(mesh.atoms) == 3
    assert [mesh.count(mesh.atoms_of[n]) for n in ("x", "x.0")] == [4, 2]


def test_atoms_keep_the_devices_in_their_flat_order(mesh_2x4):
    permuted = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]].reshape(2, 4)
    for devices in (mesh_2x4.devices, permuted):
        mesh = Mesh.of(jax.sharding.Mesh(devices, ("data", "model")))
        jax_mesh = mesh.jax_mesh
        assert isinstance(jax_mesh, jax.sharding.Mesh)
        assert jax_mesh.axis_names == ("data", "model.0", "model.1")
        assert list(jax_mesh.devices.flat) == list(devices.flat)
        assert all(kind == jax.sharding.AxisType.Auto for kind in jax_mesh.axis_types)


def test_everything_that_names_devices_is_read(mesh_2x4):
    assert str(Mesh.of(mesh_2x4)) == "data=2 model=4"
    assert str(Mesh.of(mesh_2x4.abstract_mesh)) == "data=2 model=4"
    assert Mesh.of(mesh_2x4.abstract_mesh).devices is None
    assert str(Mesh.of(6)) == str(Mesh.of(np.int64(6))) == str(Mesh.of(jax.devices()[:6])) == "devices=6"
    assert Mesh.of(jax.devices()[2:5]).devices == tuple(jax.devices()[2:5])
    mesh = Mesh.abstract(a=3)
    assert Mesh.of(mesh) is mesh
    one = Mesh.of(1)
    assert (one.atoms, one.jax_mesh.size, Mesh.abstract(a=1, b=1).abstract_jax_mesh.size) == ((), 1, 1)
    mesh = Mesh.of({"data": 3, "model": 2})
    assert str(mesh) == "data=3 model=2"
    assert mesh.devices == tuple(jax.devices()[:6])
    assert mesh.user_jax_mesh.devices[2, 1] is jax.devices()[5]


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_left_out_it_is_the_mesh_that_is_set(kind):
    ours = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(ours):
        assert Mesh.of(None).user_jax_mesh is ours
        found = []
        jax.make_jaxpr(lambda x: (found.append(Mesh.of(None).user_jax_mesh), x)[1])(1.0)
        assert found == [ours]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer JAX warns of it
        with ours:
            assert Mesh.of(None).user_jax_mesh is ours
    with jax.sharding.use_abstract_mesh(ours.abstract_mesh):
        assert Mesh.of(None).devices is None
        assert Mesh.of(None).user_jax_mesh == ours.abstract_mesh
    with pytest.raises(MeshError, match="none is set"):
        Mesh.of(None)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_the_users_own_mesh_is_remembered_but_changes_nothing(kind):
    ours = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    mesh, plain = Mesh.of(ours), Mesh.of({"data": 4, "model": 2})
    assert mesh.given is mesh.user_jax_mesh is ours
    assert plain.given is None
    assert (mesh, hash(mesh), repr(mesh)) == (plain, hash(plain), repr(plain))
    turned = mesh.reordered((1, 0, 2, 3, 4, 5, 6, 7))
    assert turned.given is None
    assert list(turned.user_jax_mesh.devices.flat) == [jax.devices()[i] for i in (1, 0, 2, 3, 4, 5, 6, 7)]
    assert turned.user_jax_mesh.axis_names == ("data", "model")
    assert turned.reordered(()).user_jax_mesh is ours
    abstract = Mesh.of(ours.abstract_mesh)
    assert abstract.given is abstract.user_jax_mesh is ours.abstract_mesh


def test_a_mesh_made_without_one_of_jaxs_gets_one_in_the_users_names():
    auto = jax.sharding.AxisType.Auto
    for mesh, names in ((Mesh.of(8), ("devices",)), (Mesh.of({"a": 1, "b": 4}), ("a", "b"))):
        assert mesh.user_jax_mesh.axis_names == names
        assert list(mesh.user_jax_mesh.devices.flat) == jax.devices()[: mesh.size]
        assert set(mesh.user_jax_mesh.axis_types) == {auto}
    kinds = (auto, auto)
    assert Mesh.abstract(a=3, b=1).user_jax_mesh == jax.sharding.AbstractMesh((3, 1), ("a", "b"), axis_types=kinds)


def test_a_cut_in_the_users_axis_names():
    mesh = Mesh.abstract(a=4, one=1, b=6, c=2)
    a, b, c = (mesh.atoms_of[n] for n in "abc")
    named = [
        ((a,), P("a")), ((), P()), (((), ()), P()), ((a, ()), P("a")), (((), a), P(None, "a")),
        (((*c, *a), b), P(("c", "a"), "b")), (((*b, *a, *c),), P(("b", "a", "c"))),
    ]  # fmt: skip
    unnamed = [(a[:1],), (a[::-1],), ((*a, *b[1:]),), (a[:1], a[1:]), ((a[0], *c, a[1]),)]
    for dims, spec in (*named, *((dims, None) for dims in unnamed)):
        assert mesh.spec_of(dims) == spec, dims


@given(st.permutations(range(4)), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_what_a_spec_says_is_the_cut_it_was_made_of(order, at):
    """Whole axes in any order on any dimension: back from the spec through a mark it is the same cut."""
    mesh = Mesh.abstract(a=4, b=6, c=2, d=5)
    dims = tuple(tuple(x for i in order if at[i] == d for x in mesh.atoms_of["abcd"[i]]) for d in range(3))
    spec = mesh.spec_of(dims)
    assert spec is not None
    assert resolve(Mark(spec=tuple(spec)), mesh, (1, 1, 1), "").dims == dims


def device(i):
    return jax.devices()[i]


ENUM = enum.Enum("ENUM", "data model")


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Mesh.of(0), "a mesh of 0 devices was asked for, and there are 8(.|\n)*number from 1 to 8"),
    (lambda: Mesh.of(9), "xla_force_host_platform_device_count"),
    (lambda: Mesh.of([]), "'devices' has 0."),
    (lambda: Mesh.abstract(a=0), "'a' has 0."),
    (lambda: Mesh.of({"data": -2, "model": -4}), "'data' has -2."),
    (lambda: Mesh.of({"data": 2.0}), "'data' has 2.0."),
    (lambda: Mesh.of({"data": True}), "'data' has True."),
    (lambda: Mesh.of({"data": "4"}), "'data' has '4'."),
    (lambda: Mesh.of({3: 4}), "and 3 has 4."),
    (
        lambda: Mesh.of({"data": 8, "model": 2}),
        r"a mesh of 16 devices was asked for, and there are 8(.|\n)*device_count=16(.|\n)*"
        r"or plan without devices: mesh=gshard.Mesh.abstract\(\*\*{'data': 8, 'model': 2}\).",
    ),
    (lambda: Mesh.of(jax.sharding.Mesh(np.array(jax.devices()), (0,))), "and 0 has 8."),
    (lambda: Mesh.of(jax.sharding.Mesh(np.array(jax.devices()), (ENUM["data"],))), "and <ENUM.data: 1> has 8."),
    (lambda: Mesh.of({}), "at least one axis"),
    (lambda: Mesh.of([device(0), device(1), device(0)]), "stands twice in the mesh"),
    (lambda: Mesh.of((4, 2)), "4 is of type int(.|\n)*axes with their sizes"),
    (lambda: Mesh.of(np.array([2, 2, 2])), "of type int64"),
    (lambda: Mesh.of(np.array(jax.devices()).reshape(4, 2)), "2 dimensions(.|\n)*jax.sharding.Mesh\\(devices"),
    (lambda: Mesh.of([device(0), "cpu:1"]), "'cpu:1' is of type str"),
    (lambda: Mesh.of([None]), "None is of type NoneType"),
    (lambda: Mesh.of([[device(0)], [device(1)]]), "of type list"),
    (lambda: Mesh.of("8"), "cannot be made of str(.|\n)*Write mesh=8, without quotes"),
    (lambda: Mesh.of(True), "cannot be made of bool"),
    (lambda: Mesh.of(np.True_), "cannot be made of bool"),
    (lambda: Mesh.of(2.5), "cannot be made of float"),
    (lambda: Mesh.of(device(0)), "cannot be made of Device"),
    (lambda: Mesh.of(None), "none is set"),
])  # fmt: skip
def test_bad_meshes_are_refused(make, text):
    with pytest.raises(MeshError, match=text) as caught:
        make()
    assert isinstance(caught.value, GShardError)
    assert caught.value.hint


# Orders of devices: every part goes from the device that holds it to one that should, and to no other.
MESHES = (Mesh.abstract(devices=8), Mesh.abstract(a=2, b=6), Mesh.abstract(a=3, b=2, c=2), Mesh.abstract(a=1, b=5))


@st.composite
def assignments(draw):
    mesh = draw(st.sampled_from(MESHES))
    count = draw(st.sampled_from([n for n in range(1, mesh.size + 1) if mesh.size % n == 0]))
    rows = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    return mesh, np.array(draw(st.permutations(range(count)))).reshape(rows, -1)


@given(assignments())
def test_in_its_order_a_table_is_a_cut(drawn):
    mesh, ids = drawn
    table = table_of_ids(ids, mesh)
    dims, order = order_for(table, mesh)
    assert sorted(order) == list(range(mesh.size))
    assert cut(table, mesh.reordered(order)) == dims
    np.testing.assert_array_equal(np.sort(np.asarray(order)[positions_of_parts(dims, mesh)]), np.sort(table))


@given(assignments(), st.data())
def test_moves_bring_every_part_home(drawn, data):
    mesh, ids = drawn
    table = table_of_ids(ids, mesh)
    dims, order = order_for(table, mesh)
    home = mesh.reordered(tuple(data.draw(st.permutations(range(mesh.size)))))
    devices = home.order or tuple(range(mesh.size))
    part_of = {int(d): part for part in np.ndindex(*ids.shape) for d in table[part]}
    pairs = permutation(dims, order, home)
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(mesh.size))
    parts = {int(p): part for part in np.ndindex(*ids.shape) for p in positions_of_parts(dims, home)[part]}
    for source, target in pairs:
        assert part_of[devices[source]] == parts[target]
        holds_it_already = part_of[devices[target]] == parts[target]
        assert (source == target) == holds_it_already


def test_a_mesh_put_in_order_twice_is_in_the_second_order():
    mesh = Mesh((("d", 4),), tuple("abcd"))
    assert mesh.reordered((3, 1, 0, 2)).devices == tuple("dbac")
    assert mesh.reordered((3, 1, 0, 2)).reordered((1, 0, 2, 3)).devices == tuple("bacd")
    assert mesh.reordered((3, 1, 0, 2)).reordered(()) == mesh == mesh.reordered((0, 1, 2, 3))
    assert mesh.reordered((3, 1, 0, 2)).order_of(tuple("bacd")) == (1, 0, 2, 3)
    assert mesh.order_of(tuple("abcx")) == ()
