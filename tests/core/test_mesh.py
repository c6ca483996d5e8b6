"""Meshes: axes become prime atoms in the same device order, and meshes that make no sense are refused."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.core.errors import GShardError, MeshError
from gshard.core.mesh import Mesh, prime_factors


@given(st.integers(1, 5000))
def test_prime_factors_multiply_to_the_number(n: int) -> None:
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
def test_axes_become_prime_atoms(axes: dict[str, int], atoms: dict[str, int]) -> None:
    mesh = Mesh.abstract(**axes)
    assert mesh.atom_sizes == atoms
    assert mesh.atoms == tuple(atoms)
    assert mesh.size == math.prod(axes.values())
    assert [a for own in mesh.atoms_of.values() for a in own] == list(atoms), "every atom belongs to one axis, in order"
    for name, size in axes.items():
        assert mesh.count(mesh.atoms_of[name]) == size
        assert mesh.format_atoms(mesh.atoms_of[name]) == (name if size > 1 else "")


def test_an_axis_named_like_an_atom_of_another_is_no_atom_of_it() -> None:
    """``x.y`` looks like an atom of ``x``; who belongs where does not depend on names."""
    mesh = Mesh.abstract(**{"x": 4, "x.y": 2})
    assert mesh.atoms_of == {"x": ("x.0", "x.1"), "x.y": ("x.y",)}


def test_axes_whose_atoms_would_have_one_name_are_kept_apart() -> None:
    """An axis ``x.0`` beside an axis ``x`` of size 4: three atoms, none of them lost."""
    mesh = Mesh.abstract(**{"x": 4, "x.0": 2})
    assert len(mesh.atoms) == 3
    assert [mesh.count(mesh.atoms_of[n]) for n in ("x", "x.0")] == [4, 2]


def test_atoms_keep_the_devices_in_their_flat_order(mesh_2x4: jax.sharding.Mesh) -> None:
    permuted = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]].reshape(2, 4)
    for devices in (mesh_2x4.devices, permuted):
        mesh = Mesh.of(jax.sharding.Mesh(devices, ("data", "model")))
        jax_mesh = mesh.jax_mesh
        assert isinstance(jax_mesh, jax.sharding.Mesh)
        assert jax_mesh.axis_names == ("data", "model.0", "model.1")
        assert list(jax_mesh.devices.flat) == list(devices.flat)
        assert all(kind == jax.sharding.AxisType.Auto for kind in jax_mesh.axis_types)


def test_everything_that_names_devices_is_read(mesh_2x4: jax.sharding.Mesh) -> None:
    assert str(Mesh.of(mesh_2x4)) == "data=2 model=4"
    assert str(Mesh.of(mesh_2x4.abstract_mesh)) == "data=2 model=4"
    assert Mesh.of(mesh_2x4.abstract_mesh).devices is None
    assert str(Mesh.of(6)) == str(Mesh.of(np.int64(6))) == str(Mesh.of(jax.devices()[:6])) == "devices=6"
    assert Mesh.of(jax.devices()[2:5]).devices == tuple(jax.devices()[2:5])
    mesh = Mesh.abstract(a=3)
    assert Mesh.of(mesh) is mesh


def test_a_mesh_of_one_device_has_a_mesh_of_jax() -> None:
    mesh = Mesh.of(1)
    assert mesh.atoms == ()
    assert mesh.jax_mesh.size == 1
    assert Mesh.abstract(a=1, b=1).abstract_jax_mesh.size == 1


def device(i: int) -> Any:
    return jax.devices()[i]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mesh.of(0), "a mesh of 0 devices was asked for, and there are 8"),
        (lambda: Mesh.of(-1), "a mesh of -1 devices"),
        (lambda: Mesh.of(9), "xla_force_host_platform_device_count"),
        (lambda: Mesh.of([]), "at least one axis and one device"),
        (lambda: Mesh.abstract(), "at least one axis and one device"),
        (lambda: Mesh.abstract(a=0), "at least one axis and one device"),
        (lambda: Mesh.abstract(a=2, b=-2), "at least one axis and one device"),
        (lambda: Mesh.of([device(0), device(1), device(0)]), "stands twice in the mesh"),
        (lambda: Mesh.of(3.5), "cannot be made of float"),  # type: ignore[arg-type]
        (lambda: Mesh.of(None), "cannot be made of NoneType"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_bad_meshes_are_refused(make: Any, text: str) -> None:
    with pytest.raises(MeshError, match=text) as caught:
        make()
    assert isinstance(caught.value, GShardError)
