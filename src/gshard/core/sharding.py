"""Defines shardings: the atoms of the mesh that split each dimension of an array.

    >>> mesh = Mesh.abstract(data=2, expert=4)
    >>> s = Sharding((("data",), (), ("expert.0", "expert.1")))
    >>> s.format(mesh, (8, 512, 2048), "f32")
    'f32[8@data,512,2048@expert]'
    >>> s.local_shape(mesh, (8, 512, 2049))
    (4, 512, 513)

A dimension of ``n`` elements over ``p`` parts has ``ceil(n / p)`` elements on every device. The last parts may be
padding, partly or entirely, and the padding is undefined. The array is replicated over an atom that does not occur in
the sharding. Over an atom in ``unreduced``, each device holds a part that must be combined (for example added) with the
parts of the others.
"""

from __future__ import annotations

import dataclasses
import re

from gshard.core.errors import ShardingError, known_names
from gshard.core.mesh import Atoms, Mesh


class _Hashed:
    """A place for the hash of a sharding, which is no attribute of it."""

    __slots__ = ("_hash",)
    _hash: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding(_Hashed):
    """The distribution of an array over a mesh.

    Attributes:
        dims: for each dimension the atoms that split it, major to minor.
        unreduced: pairs of an atom over which the array is unreduced, and the monoid; sorted by atom.
    """

    dims: tuple[Atoms, ...]
    unreduced: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:
        """The hash, computed once: planning looks up each sharding very often."""
        try:
            return self._hash
        except AttributeError:
            found = hash((self.dims, self.unreduced))
            object.__setattr__(self, "_hash", found)
            return found

    @staticmethod
    def replicated(ndim: int) -> Sharding:
        """The sharding of an array that every device holds whole."""
        return Sharding(((),) * ndim)

    @property
    def atoms(self) -> Atoms:
        """All atoms of the sharding, of dimensions and unreduced."""
        return (*(a for dim in self.dims for a in dim), *(a for a, _ in self.unreduced))

    def with_unreduced(self, unreduced: dict[str, str]) -> Sharding:
        """The same dimensions, unreduced over these atoms: a monoid for each atom."""
        return Sharding(self.dims, tuple(sorted(unreduced.items()))) if unreduced or self.unreduced else self

    def local_shape(self, mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part, padding included."""
        return tuple([-(-n // mesh.count(atoms)) for n, atoms in zip(shape, self.dims, strict=True)])

    def is_even(self, mesh: Mesh, shape: tuple[int, ...]) -> bool:
        """Whether no part holds padding."""
        return all(n % mesh.count(atoms) == 0 for n, atoms in zip(shape, self.dims, strict=True))

    def format(self, mesh: Mesh, shape: tuple[int, ...], dtype: str = "") -> str:
        """The text ``f32[8@data,512,2048@(expert,pod)]{U:model}``. A monoid other than add is named."""
        dims = []
        for n, atoms in zip(shape, self.dims, strict=True):
            axes = mesh.format_atoms(atoms)
            dims.append(f"{n}@({axes})" if "," in axes else f"{n}@{axes}" if axes else str(n))
        text = f"{dtype}[{','.join(dims)}]"
        if self.unreduced:
            by_monoid: dict[str, list[str]] = {}
            for atom, monoid in self.unreduced:
                by_monoid.setdefault(monoid, []).append(atom)
            parts = [
                f"U{'' if monoid == 'add' else ' ' + monoid}:{mesh.format_atoms(atoms)}"
                for monoid, atoms in by_monoid.items()
            ]
            text += "{" + " ".join(parts) + "}"
        return text

    @staticmethod
    def parse(text: str, mesh: Mesh) -> tuple[Sharding, tuple[int, ...], str]:
        """Parses the text of ``format``: returns the sharding, the global shape and the dtype.

        Raises:
            ShardingError: the text is not the text of a sharding, or the mesh has no such axis.
        """
        entry = r"\d+(?:@(?:\([\w.,]+\)|[\w.]+))?"
        match = re.fullmatch(rf"(\w*(?:<\w+>)?)\[((?:{entry}(?:, ?{entry})*)?)\](?:\{{(.*)\}})?", text.strip())
        if not match:
            raise ShardingError(f"{text!r} is not the text of a sharding.", hint="Write f32[8@data,512].")
        dtype, inside, tail = match.groups()
        entries = re.findall(r"(\d+)(?:@(?:\(([^)]*)\)|([\w.]+)))?", inside)
        dims = tuple(_atoms((several or one), mesh) for _, several, one in entries)
        unreduced: dict[str, str] = {}
        for monoid, axes in re.findall(r"U ?(\w*):([\w.,]+)", tail or ""):
            unreduced.update(dict.fromkeys(_atoms(axes, mesh), monoid or "add"))
        return Sharding(dims).with_unreduced(unreduced), tuple(int(n) for n, _, _ in entries), dtype


def _atoms(axes: str, mesh: Mesh) -> Atoms:
    names = [a for a in axes.split(",") if a]
    for name in names:
        if name not in mesh.atoms_of and name not in mesh.atom_sizes:
            hint = known_names(name, mesh.atoms_of)
            raise ShardingError(f"the mesh has no axis {name!r}.", got=f"mesh: {mesh}", hint=hint)
    return tuple(a for name in names for a in mesh.atoms_of.get(name, (name,)))


def common_prefix(a: Atoms, b: Atoms) -> Atoms:
    """The longest common prefix of two sequences of atoms.

    >>> common_prefix(("x.0", "x.1"), ("x.0", "y"))
    ('x.0',)
    """
    k = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        k += 1
    return a[:k]


def cut_evenly(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    """The sharding reduced to the leading atoms of each dimension that split it into equal parts.

    >>> cut_evenly(Sharding((("x", "y"), ("z",))), (6, 5), Mesh.abstract(x=2, y=2, z=2)).dims
    (('x',), ())
    """
    dims = []
    for n, atoms in zip(shape, sharding.dims, strict=True):
        while n % mesh.count(atoms):
            atoms = atoms[:-1]
        dims.append(atoms)
    return Sharding(tuple(dims))


def padded_shape(sharding: Sharding, mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array with every dimension rounded up to equal parts.

    >>> padded_shape(Sharding((("x",), ())), Mesh.abstract(x=2), (5, 3))
    (6, 3)
    """
    parts = zip(sharding.local_shape(mesh, shape), sharding.dims, strict=True)
    return tuple(n * mesh.count(atoms) for n, atoms in parts)
