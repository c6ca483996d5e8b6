"""Mesh: the devices, as a grid of named axes and of the atoms that the axes are made of.

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
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.errors import MeshError

Atoms = tuple[str, ...]


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


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """What things count as, in bytes sent, when ways to split an equation are compared.

    By default an operation counts as one byte, so that no work is done twice to send less: not to split the rows of a
    product (m, k) @ (k, n) spares at most an all-reduce of the gradient of its weights, 8 k n bytes in float32, and
    does up to 2 m k n operations more; m is at least the number of devices, and a device has 4 rows to work on.
    A named machine tells what operations and bytes really take.

    Attributes:
        products: for an operation of a product, by the bytes of an element; others count as elements of 4 bytes do.
        other: for any other operation.
        message: for each collective, besides its bytes: among equals prefer fewer of them.
    """

    products: tuple[tuple[int, float], ...] = ((4, 1.0),)
    other: float = 1.0
    message: float = 16.0

    def product(self, itemsize: int) -> float:
        """What an operation of a product of such elements counts as."""
        known = dict(self.products)
        return known.get(itemsize, known[4])


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A grid of devices.

    Attributes:
        axes: the user's axis names and sizes, major to minor.
        devices: the devices in row-major order of the axes, or None for a mesh that is only planned for.
        order: which of the devices, as they came, stands at each position; () if they are left in their order.
        prices: what computing and messages count as against sending.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[Any, ...] | None = None
    order: tuple[int, ...] = ()
    prices: Prices = Prices()

    @staticmethod
    def abstract(**axes: int) -> Mesh:
        """A mesh without devices, to plan for: ``Mesh.abstract(data=2, expert=4)``."""
        return Mesh._checked(tuple(axes.items()), None)

    @staticmethod
    def of(mesh: Mesh | jax.sharding.Mesh | jax.sharding.AbstractMesh | int | Sequence[Any]) -> Mesh:
        """Reads whatever names some devices.

        Args:
            mesh: a mesh of ours or of JAX's, a number of devices (the first ones of ``jax.devices()``), or a
                list of devices. Devices given without axes form one axis called ``devices``.

        Raises:
            MeshError: there are no such devices, or a device is named twice.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, jax.sharding.Mesh):
            axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
            return Mesh._checked(axes, tuple(mesh.devices.flat))
        if isinstance(mesh, jax.sharding.AbstractMesh):
            return Mesh._checked(tuple((str(name), int(size)) for name, size in mesh.shape.items()), None)
        if isinstance(mesh, int | np.integer):
            available = jax.devices()
            if not 1 <= mesh <= len(available):
                raise MeshError(
                    f"a mesh of {mesh} devices was asked for, and there are {len(available)}.",
                    got=f"devices: {', '.join(map(str, available[:8]))}{', ...' if len(available) > 8 else ''}",
                    way_out="On CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=N before JAX starts.",
                )
            return Mesh._checked((("devices", int(mesh)),), tuple(available[: int(mesh)]))
        if isinstance(mesh, Iterable):
            devices = tuple(mesh)
            return Mesh._checked((("devices", len(devices)),), devices)
        raise MeshError(
            f"a mesh cannot be made of {type(mesh).__name__}.",
            way_out="Give a jax.sharding.Mesh, a number of devices or a list of devices.",
        )

    @staticmethod
    def _checked(axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...] | None) -> Mesh:
        if any(size < 1 for _, size in axes) or not axes:
            raise MeshError("a mesh needs at least one axis and one device.", got=f"axes: {dict(axes)}")
        if devices is not None and len(set(devices)) != len(devices):
            twice = next(d for i, d in enumerate(devices) if d in devices[:i])
            raise MeshError(f"device {twice} stands twice in the mesh.", way_out="Name each device once.")
        return Mesh(axes, devices)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.devices, self.order, self.prices))

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
            for atom, prime in zip(self.atoms_of[name], prime_factors(size), strict=True)
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
            count = len(prime_factors(size))
            own = [name] if count == 1 else []
            for i in range(count if count > 1 else 0):
                atom = f"{name}.{i}"
                while atom in taken:  # the user has an axis of this name
                    atom += "_"
                taken.add(atom)
                own.append(atom)
            atoms_of[name] = tuple(own)
        return atoms_of

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
            axis = next((n for n, own in self.atoms_of.items() if own and tuple(atoms[i : i + len(own)]) == own), None)
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

    def __str__(self) -> str:
        order = f", devices in the order {','.join(map(str, self.order))}" if self.order else ""
        return " ".join(f"{name}={size}" for name, size in self.axes) + order
