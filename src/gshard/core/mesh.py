"""Mesh: the devices as a grid of named axes, and the atoms of these axes.

Every axis is factored into primes on entry (8 -> 2*2*2, 6 -> 2*3). These *atoms* are the real axes of the
``shard_map`` mesh: the same devices in the same flat order, so the factoring costs no communication, and a
part of an axis is then just some of its atoms. Printing merges atoms back into the user's names.

    >>> mesh = Mesh.abstract(data=2, expert=4)
    >>> mesh.atoms
    ('data', 'expert.0', 'expert.1')
    >>> mesh.format_atoms(("data", "expert.0", "expert.1"))
    'data,expert'
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from gshard.core.errors import MeshError
from gshard.core.jax_adapter import mesh_of_context, user_line

Atoms = tuple[str, ...]
Devices = Mapping[str, int] | int | Sequence[Any] | np.ndarray


def prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors of ``n`` in rising order.

    >>> prime_factors(12)
    (2, 2, 3)
    """
    factors, p = [], 2
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
        devices: the devices in row-major order of the axes, or None for a mesh that is only planned for.
        order: which of the devices, as they came, stands at each position; () if they are left in their order.
        times: what steps of moving an array take (``comm.steps.Times``); None counts the bytes that are sent.
        factored: whether axes are factored into primes; where only whole axes move, there is less to look at without.
        made_from: the mesh of JAX's that it was read from, if it was. Meshes are equal whatever they were read from.
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
        """A mesh without devices, to plan for: ``Mesh.abstract(data=2, expert=4)``."""
        return Mesh._checked(tuple(axes.items()), None)

    @staticmethod
    def of(mesh: MeshLike) -> Mesh:
        """Reads whatever names some devices.

        Args:
            mesh: a mesh of ours or of JAX's (abstract ones can only be planned for), a number of devices (the first
                ones of ``jax.devices()``), ``{"data": 4, "model": 2}`` (over the first ones, the last axis fastest), or
                a list or an array of one dimension of devices. Devices given without axes form one axis called
                ``devices``. None takes the mesh that ``jax.set_mesh`` or ``with mesh`` has set.

        Raises:
            MeshError: there are no such devices, a device is named twice, an axis has no name or no size, it is
                nothing that names devices, or no mesh is set.
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
            if not isinstance(name, str) or not name:
                raise MeshError(
                    f"{name!r} cannot be the name of an axis of a mesh.",
                    got=f"axes: {dict(axes)}",
                    hint='Name each axis by text, such as {"data": 4, "model": 2}.',
                )
            if not isinstance(size, int | np.integer) or isinstance(size, bool):
                raise MeshError(
                    f"the size of axis {name!r} is a number of devices, not {type(size).__name__}.",
                    got=f"axes: {dict(axes)}",
                    hint='Give each axis a whole number from 1 on, such as {"data": 4, "model": 2}.',
                )
        if any(size < 1 for _, size in axes) or not axes:
            raise MeshError(
                "a mesh needs at least one axis and one device.",
                got=f"axes: {dict(axes)}",
                hint="Give each axis a whole number of devices from 1 on.",
            )
        if len(set(names)) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise MeshError(f"the mesh has two axes named {twice!r}.", hint="Name each axis differently.")

    @property
    def given(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
        """The user's own mesh of JAX's; None if there is none, or if the devices stand in another order than there."""
        return None if self.order else self.made_from

    @functools.cached_property
    def user_jax_mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """JAX's mesh in the user's axis names: the one that was given, or one with all axes of type Auto."""
        if self.given is not None:
            return self.given
        names, sizes = zip(*self.axes, strict=True)
        kinds = (jax.sharding.AxisType.Auto,) * len(names)
        if self.devices is None:
            return jax.sharding.AbstractMesh(sizes, names, axis_types=kinds)
        return jax.sharding.Mesh(np.array(self.devices, dtype=object).reshape(sizes), names, axis_types=kinds)

    def spec_of(self, dims: Sequence[Atoms]) -> PartitionSpec | None:
        """The ``PartitionSpec`` that says a cut in the user's axis names; None if it takes only a part of an axis.

        Trailing dimensions that are whole are left out, as ``jax.jit`` does: JAX compares specs as they are written.

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
        """The axis all of whose atoms stand at this place, if there is one."""
        return next((n for n, own in self.atoms_of.items() if own and tuple(atoms[i : i + len(own)]) == own), None)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.devices, self.order, self.times, self.factored))

    def __hash__(self) -> int:
        # Asked for at every step of planning, and the same for ever.
        return self._hash

    def reordered(self, order: tuple[int, ...]) -> Mesh:
        """The same devices with device ``order[i]``, as they came, at position ``i``; () is the order they came in."""
        order = () if order == tuple(range(self.size)) else order
        if order == self.order or self.devices is None:
            return dataclasses.replace(self, order=order)
        came = [self.devices[i] for i in np.argsort(self.order)] if self.order else self.devices
        return dataclasses.replace(self, devices=tuple(came[d] for d in order) if order else tuple(came), order=order)

    def without(self, atoms: Collection[str]) -> Mesh:
        """The mesh of the devices that differ in none of these atoms: the other atoms, under their own names.

        >>> Mesh.abstract(data=4, model=2).without({"data.0", "model"}).atoms
        ('data.1',)
        """
        axes: list[tuple[str, int]] = []
        for name, size in self.axes:
            own = [a for a in self.atoms_of[name] if a not in atoms]
            whole = own == list(self.atoms_of[name])
            axes += [(name, size)] if whole else [(a, self.atom_sizes[a]) for a in own]
        return Mesh(tuple(axes), factored=self.factored)  # what steps take is known of all devices

    def order_of(self, devices: Sequence[Any]) -> tuple[int, ...]:
        """The order in which these devices stand; () if that is how they came, or if they are not the mesh's."""
        if not devices or self.devices is None or (not self.order and tuple(devices) == self.devices):
            return ()
        came = {d: self.order[i] if self.order else i for i, d in enumerate(self.devices)}
        if len(devices) != len(came) or any(d not in came for d in devices):
            return ()
        order = tuple(came[d] for d in devices)
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
            own = [name] if count == 1 else []
            for i in range(count if count > 1 else 0):
                atom = f"{name}.{i}"
                while atom in taken:  # the user has an axis of this name
                    atom += "_"
                taken.add(atom)
                own.append(atom)
            atoms_of[name] = tuple(own)
        return atoms_of

    def _factors(self, size: int) -> tuple[int, ...]:
        return prime_factors(size) if self.factored or size == 1 else (size,)

    def count(self, atoms: Iterable[str]) -> int:
        """The number of parts that splitting over ``atoms`` makes."""
        if not atoms:
            return 1
        sizes = self.atom_sizes
        return math.prod([sizes[a] for a in atoms])

    def format_atoms(self, atoms: Sequence[str]) -> str:
        """Atoms as the user's axes where they make a whole one, by their own names otherwise."""
        names, i = [], 0
        while i < len(atoms):
            axis = self._axis_at(atoms, i)
            names.append(axis or atoms[i])
            i += len(self.atoms_of[axis]) if axis else 1
        return ",".join(names)

    @functools.cached_property
    def jax_mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """JAX's mesh over the atoms (all axes of type Auto): concrete if the devices are known."""
        names = self.atoms or ("one",)
        sizes = tuple(self.atom_sizes.values()) or (1,)
        kinds = (jax.sharding.AxisType.Auto,) * len(names)
        if self.devices is None:
            return jax.sharding.AbstractMesh(sizes, names, axis_types=kinds)
        return jax.sharding.Mesh(np.array(self.devices, dtype=object).reshape(sizes), names, axis_types=kinds)

    @functools.cached_property
    def abstract_jax_mesh(self) -> jax.sharding.AbstractMesh:
        """JAX's mesh over the atoms without devices."""
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


def _first_devices(axes: tuple[tuple[str, int], ...]) -> tuple[Any, ...]:
    """As many of the first of ``jax.devices()`` as the axes need."""
    available, count = jax.devices(), math.prod(size for _, size in axes)
    if 1 <= count <= len(available):
        return tuple(available[:count])
    raise MeshError(
        f"a mesh of {count} devices was asked for, and there are {len(available)}.",
        got=f"devices: {', '.join(map(str, available[:8]))}{', ...' if len(available) > 8 else ''}",
        hint=f"On CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts; or plan without "
        f"devices: mesh=gshard.Mesh.abstract({_keywords(axes)})."
        if count > 0
        else f"Give a number from 1 to {len(available)}.",
    )


def _keywords(axes: tuple[tuple[str, int], ...]) -> str:
    """Axes as the arguments of a call."""
    words = all(name.isidentifier() for name, _ in axes)
    return ", ".join(f"{name}={n}" for name, n in axes) if words else f"**{dict(axes)}"


def _listed(devices: Sequence[Any] | np.ndarray) -> tuple[Any, ...]:
    """A list of devices, checked to be one."""
    sizes = tuple(devices)
    if sizes and all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in sizes):
        names = ("data", "model", "expert", "stage")
        axes = {names[i] if i < len(names) else f"axis{i}": int(n) for i, n in enumerate(sizes)}
        raise MeshError(
            "a mesh is made of devices, and these are numbers.",
            got=f"mesh={devices!r}"[:200],
            hint="If they are the sizes of its axes, name the axes: "
            f"mesh={{{', '.join(f'{k!r}: {v}' for k, v in axes.items())}}}.".replace("'", '"'),
        )
    if isinstance(devices, np.ndarray) and devices.ndim != 1:
        raise MeshError(
            f"an array of devices of {devices.ndim} dimensions does not say how its axes are called.",
            got=f"an array of shape {devices.shape}",
            hint='Give jax.sharding.Mesh(devices, ("data", "model")), with a name for each dimension.',
        )
    wrong = next((d for d in sizes if not isinstance(d, jax.Device)), None)
    if wrong is not None or None in sizes:
        raise MeshError(
            f"a mesh is made of devices, and {wrong!r} is of type {type(wrong).__name__}.",
            hint="Give some of jax.devices(), or a number of them.",
        )
    return sizes


def common_prefix(a: Atoms, b: Atoms) -> Atoms:
    """The atoms with which both begin.

    >>> common_prefix(("x.0", "x.1"), ("x.0", "y"))
    ('x.0',)
    """
    return tuple(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


MeshLike = Mesh | jax.sharding.Mesh | jax.sharding.AbstractMesh | Devices | None  # what ``Mesh.of`` reads
