"""Defines the mesh: a grid of devices with named axes, which gshard factors into atoms.

gshard factors every axis into primes (8 -> 2*2*2, 6 -> 2*3). These *atoms* are the axes of the mesh of the per-device
``shard_map``. The devices and their flat order stay the same, so the factoring costs no communication. A part of an
axis is a set of its atoms. Printed text joins atoms to the user's axis names again.

    >>> mesh = Mesh.abstract(data=2, expert=4)
    >>> mesh.atoms
    ('data', 'expert.0', 'expert.1')
    >>> mesh.format_atoms(("data", "expert.0", "expert.1"))
    'data,expert'
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from gshard.core.errors import MeshError, listed
from gshard.core.jax_adapter import mesh_of_context, user_line
from gshard.core.planning_tables import tabulated

Atoms = tuple[str, ...]
Devices = Mapping[str, int] | int | Sequence[Any] | np.ndarray


def prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors of ``n`` in rising order.

    >>> prime_factors(12)
    (2, 2, 3)
    """
    factors: list[int] = []
    p = 2
    while p * p <= n:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return (*factors, n) if n > 1 else tuple(factors)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A grid of devices.

    Attributes:
        axes: the user's axis names and sizes, major to minor.
        devices: the devices in row-major order of the axes; None for a mesh without devices, which can only be planned.
        order: for each position the number of its device in the given order; () if the given order is unchanged.
        times: the times of reshard steps (``device.network.StepTimes``); None counts the bytes sent.
        factored: whether axes are factored into primes. If only whole axes move, planning is faster without.
        made_from: the JAX mesh from which this mesh was read, if any. It does not affect equality.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[Any, ...] | None = None
    order: tuple[int, ...] = ()
    times: Any = None
    factored: bool = True
    made_from: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @staticmethod
    def abstract(**axes: int) -> Mesh:
        """A mesh without devices, for planning: ``Mesh.abstract(data=2, expert=4)``."""
        return Mesh._checked(tuple(axes.items()), None)

    @staticmethod
    def of(mesh: MeshLike) -> Mesh:
        """Converts a description of devices to a mesh.

        Args:
            mesh: a gshard or JAX mesh (an abstract mesh can only be planned), a number of devices (the first of
                ``jax.devices()``), ``{"data": 4, "model": 2}`` (over the first devices, the last axis fastest), or
                a list or a one-dimensional array of devices. Devices without axes form one axis called ``devices``.
                None takes the mesh that ``jax.set_mesh`` or ``with mesh`` has set.

        Raises:
            MeshError: there are no such devices, a device occurs twice, an axis has no valid name or size, the value
                does not describe devices, or no mesh is set.
        """
        if mesh is None:
            mesh = mesh_of_context()
            if mesh is None:
                raise MeshError(
                    "no mesh was given, and none is set.",
                    user_line(),
                    hint="Give mesh=8 or a jax.sharding.Mesh, or call inside `with jax.set_mesh(mesh):`.",
                )
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
            axes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
            devices = tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None
            return Mesh._checked(axes, devices, mesh)
        if isinstance(mesh, Mapping):
            axes = tuple(mesh.items())
            Mesh._check_axes(axes)
            return Mesh._checked(axes, _first_devices(axes))
        if isinstance(mesh, int | np.integer) and not isinstance(mesh, bool):
            axes = (("devices", int(mesh)),)
            return Mesh._checked(axes, _first_devices(axes))
        if isinstance(mesh, Sequence | np.ndarray) and not isinstance(mesh, str | bytes):
            devices = _listed(mesh)
            return Mesh._checked((("devices", len(devices)),), devices)
        raise MeshError(
            f"a mesh cannot be made of {type(mesh).__name__}.",
            got=f"mesh={mesh!r}"[:200],
            hint=f"Write mesh={int(mesh)}, without quotes."
            if isinstance(mesh, str) and mesh.isdecimal()
            else 'Give a jax.sharding.Mesh, a number of devices, a list of devices, or {"data": 4, "model": 2}.',
        )

    @staticmethod
    def _checked(
        axes: tuple[tuple[str, int], ...],
        devices: tuple[Any, ...] | None,
        made_from: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    ) -> Mesh:
        Mesh._check_axes(axes)
        if devices is not None and len(set(devices)) != len(devices):
            twice = next(d for i, d in enumerate(devices) if d in devices[:i])
            raise MeshError(f"device {twice} stands twice in the mesh.", hint="Name each device once.")
        return Mesh(tuple((name, int(size)) for name, size in axes), devices, made_from=made_from)

    @staticmethod
    def _check_axes(axes: tuple[tuple[Any, Any], ...]) -> None:
        names = [name for name, _ in axes]
        for name, size in axes:
            is_number = isinstance(size, int | np.integer) and not isinstance(size, bool)
            if not isinstance(name, str) or not name or not is_number or size < 1:
                raise MeshError(
                    f"an axis of a mesh has a name and a number of devices, and {name!r} has {size!r}.",
                    got=f"axes: {dict(axes)}",
                    hint='Name each axis by text, with a whole number from 1 on, such as {"data": 4, "model": 2}.',
                )
        if not axes:
            raise MeshError("a mesh needs at least one axis.", hint='Give axes, such as {"data": 4, "model": 2}.')
        if len(set(names)) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise MeshError(f"the mesh has two axes named {twice!r}.", hint="Name each axis differently.")

    @property
    def given(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
        """The user's JAX mesh; None if there is none, or if the devices are reordered."""
        return None if self.order else self.made_from

    @functools.cached_property
    def user_jax_mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """A JAX mesh with the user's axis names: the given mesh, or a new mesh with all axes of type Auto."""
        if self.given is not None:
            return self.given
        return automatic_mesh(dict(self.axes), self.devices)

    def spec_of(self, dims: Sequence[Atoms]) -> PartitionSpec | None:
        """The ``PartitionSpec`` of a sharding in the user's axis names; None if it splits over a part of an axis.

        The spec omits trailing whole dimensions like ``jax.jit``, because JAX compares specs entry by entry.

        >>> mesh = Mesh.abstract(data=4, model=2)
        >>> mesh.spec_of((("model", "data.0", "data.1"), ())) == PartitionSpec(("model", "data"))
        True
        >>> mesh.spec_of((("data.0",), ())) is None
        True
        """
        entries: list[str | tuple[str, ...] | None] = []
        for atoms in dims:
            names, i = [], 0
            while i < len(atoms):
                name = self._axis_at(atoms, i)
                if name is None:
                    return None
                names.append(name)
                i += len(self.atoms_of[name])
            entries.append(tuple(names) if len(names) > 1 else names[0] if names else None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def _axis_at(self, atoms: Sequence[str], i: int) -> str | None:
        """The axis whose atoms are all at position ``i`` of a sequence of atoms, if there is one."""
        for name, atoms_of_axis in self.atoms_of.items():
            if atoms_of_axis and tuple(atoms[i : i + len(atoms_of_axis)]) == atoms_of_axis:
                return name
        return None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.devices, self.order, self.times, self.factored))

    def __hash__(self) -> int:
        # Cached, because planning hashes meshes very often.
        return self._hash

    def reordered(self, order: tuple[int, ...]) -> Mesh:
        """The mesh with device ``order[i]`` of the given order at position ``i``; () restores the given order."""
        order = () if order == tuple(range(self.size)) else order
        if order == self.order or self.devices is None:
            return dataclasses.replace(self, order=order)
        given_order = [self.devices[i] for i in np.argsort(self.order)] if self.order else self.devices
        devices = tuple(given_order[d] for d in order) if order else tuple(given_order)
        return dataclasses.replace(self, devices=devices, order=order)

    @tabulated(64)
    def without(self, atoms: frozenset[str]) -> Mesh:
        """The mesh of the devices with one position along these atoms. Its axes are the other axes and atoms.

        >>> Mesh.abstract(data=4, model=2).without(frozenset({"data.0", "model"})).atoms
        ('data.1',)
        """
        axes: list[tuple[str, int]] = []
        for name, size in self.axes:
            remaining = [a for a in self.atoms_of[name] if a not in atoms]
            is_whole = remaining == list(self.atoms_of[name])
            axes += [(name, size)] if is_whole else [(a, self.atom_sizes[a]) for a in remaining]
        return Mesh(tuple(axes), factored=self.factored)  # without ``times``, which are measured for all devices

    def order_of(self, devices: Sequence[Any]) -> tuple[int, ...]:
        """The order of these devices; () if it is the given order, or if they are not the devices of the mesh."""
        if not devices or self.devices is None or (not self.order and tuple(devices) == self.devices):
            return ()
        number_of = {d: self.order[i] if self.order else i for i, d in enumerate(self.devices)}
        if len(devices) != len(number_of) or any(d not in number_of for d in devices):
            return ()
        order = tuple(number_of[d] for d in devices)
        return () if order == tuple(range(len(order))) else order

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    @functools.cached_property
    def atom_sizes(self) -> dict[str, int]:
        """Each atom with its (prime) size, major to minor; axes of size 1 have none."""
        return {
            atom: prime
            for name, size in self.axes
            for atom, prime in zip(self.atoms_of[name], self._factors(size), strict=True)
        }

    @functools.cached_property
    def atoms(self) -> Atoms:
        """Names of the atoms, major to minor."""
        return tuple(self.atom_sizes)

    @functools.cached_property
    def atoms_of(self) -> dict[str, Atoms]:
        """The atoms of each of the user's axes; an axis of prime size is its own atom."""
        taken = {name for name, _ in self.axes}
        atoms_of: dict[str, Atoms] = {}
        for name, size in self.axes:
            count = len(self._factors(size))
            atoms = [name] if count == 1 else []
            for i in range(count if count > 1 else 0):
                atom = f"{name}.{i}"
                while atom in taken:  # the user has an axis of this name
                    atom += "_"
                taken.add(atom)
                atoms.append(atom)
            atoms_of[name] = tuple(atoms)
        return atoms_of

    def _factors(self, size: int) -> tuple[int, ...]:
        return prime_factors(size) if self.factored or size == 1 else (size,)

    def count(self, atoms: Iterable[str]) -> int:
        """The number of parts of a split over ``atoms``."""
        if (names := tuple(atoms)) not in self._counts:
            self._counts[names] = math.prod([self.atom_sizes[a] for a in names])
        return self._counts[names]

    @functools.cached_property
    def _counts(self) -> dict[Atoms, int]:  # planning needs the same numbers very often
        return {}

    def format_atoms(self, atoms: Sequence[str]) -> str:
        """The atoms as text: the user's axis name for all atoms of an axis, otherwise the names of the atoms."""
        names, i = [], 0
        while i < len(atoms):
            axis = self._axis_at(atoms, i)
            names.append(axis or atoms[i])
            i += len(self.atoms_of[axis]) if axis else 1
        return ",".join(names)

    @functools.cached_property
    def jax_mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """The JAX mesh over the atoms (all axes of type Auto), which is concrete if there are devices."""
        return automatic_mesh(self.atom_sizes or {"one": 1}, self.devices)

    @functools.cached_property
    def abstract_jax_mesh(self) -> jax.sharding.AbstractMesh:
        """The JAX mesh over the atoms without devices."""
        mesh = self.jax_mesh
        return mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh

    def on_first_devices(self) -> Mesh:
        """An abstract mesh on the first devices, to compile for them; a mesh of devices itself.

        Raises:
            MeshError: there are fewer devices.
        """
        if self.devices is not None:
            return self
        if self.size > (there := len(jax.devices())):
            raise MeshError(
                f"XLA compiles for devices that exist: the mesh has {self.size}, and there are {there}.",
                user_line(),
                got=f"mesh: {self}",
                hint=f"On CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={self.size}, or call "
                f'jax.config.update("jax_num_cpu_devices", {self.size}), before JAX starts; for tests, in conftest.py.',
            )
        return Mesh.of(dict(self.axes))

    def __str__(self) -> str:
        order = f", devices in the order {','.join(map(str, self.order))}" if self.order else ""
        return " ".join(f"{name}={size}" for name, size in self.axes) + order


def automatic_mesh(
    axes: Mapping[str, int], devices: Sequence[Any] | None
) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """A JAX mesh whose axes are all of type Auto; an abstract one without devices."""
    names, sizes, kinds = tuple(axes), tuple(axes.values()), (jax.sharding.AxisType.Auto,) * len(axes)
    if devices is None:
        return jax.sharding.AbstractMesh(sizes, names, axis_types=kinds)
    return jax.sharding.Mesh(np.array(devices, dtype=object).reshape(sizes), names, axis_types=kinds)


def _first_devices(axes: tuple[tuple[str, int], ...]) -> tuple[Any, ...]:
    """The first of ``jax.devices()``, as many as the axes need."""
    available = jax.devices()
    count = math.prod(size for _, size in axes)
    if 1 <= count <= len(available):
        return tuple(available[:count])
    raise MeshError(
        f"a mesh of {count} devices was asked for, and there are {len(available)}.",
        got=f"devices: {', '.join(listed([str(d) for d in available]))}",
        hint=f"On CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts; or plan without "
        f"devices: mesh=gshard.Mesh.abstract(**{dict(axes)})."
        if count > 0
        else f"Give a number from 1 to {len(available)}.",
    )


def _listed(devices: Sequence[Any] | np.ndarray) -> tuple[Any, ...]:
    """Checks a list of devices."""
    elements = tuple(devices)
    if isinstance(devices, np.ndarray) and devices.ndim != 1:
        raise MeshError(
            f"an array of devices of {devices.ndim} dimensions does not say how its axes are called.",
            got=f"an array of shape {devices.shape}",
            hint='Give jax.sharding.Mesh(devices, ("data", "model")), with a name for each dimension.',
        )
    wrong = next((d for d in elements if not isinstance(d, jax.Device)), None)
    if wrong is not None or None in elements:
        raise MeshError(
            f"a mesh is made of devices, and {wrong!r} is of type {type(wrong).__name__}.",
            hint='Give some of jax.devices(), or a number of them; or axes with their sizes: {"data": 4, "model": 2}.',
        )
    return elements


MeshLike = Mesh | jax.sharding.Mesh | jax.sharding.AbstractMesh | Devices | None  # the argument of ``Mesh.of``
