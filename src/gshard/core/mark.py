"""Mark: a sharding constraint of the user on one value, and its meaning on a mesh.

``split(x, 0, 4)`` on 8 devices cuts dimension 0 over the major atoms of the mesh, so that each part is held by
consecutive devices; an array of device ids is read as strides in the flat order of the devices.

    >>> mesh = Mesh.abstract(devices=8)
    >>> resolve(Mark("split", dim=1, partitions=4), mesh, (6, 8), "").dims
    ((), ('devices.0', 'devices.1'))
    >>> ids = Mark("assignment", ids=(0, 2, 4, 6, 1, 3, 5, 7), ids_shape=(2, 4))
    >>> resolve(ids, mesh, (6, 8), "").dims
    (('devices.2',), ('devices.0', 'devices.1'))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from gshard.core.device_order import Order, cut, order_for, table_of_axes, table_of_ids
from gshard.core.errors import ShardingError, known_names
from gshard.core.mesh import Atoms, Mesh
from gshard.core.partition_spec import text_of_spec
from gshard.core.sharding import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """One ``replicate``, ``split`` or ``shard`` of the user's, or a sharding from JAX's own words.

    Attributes:
        kind: ``replicate``, ``split`` (``dim``, ``partitions``), ``assignment`` (``ids``, ``ids_shape``)
            or ``spec`` (``spec``: the entries of a ``PartitionSpec``).
        dim: the dimension that ``split`` cuts, counted without the dimensions that vmap added.
        partitions: a number of parts, or the name(s) of mesh axes.
        ids: device ids in row-major order.
        ids_shape: number of parts along each dimension.
        spec: for each dimension None, an axis name, a tuple of names, a number of parts (by a layout), or
            ``PartitionSpec.UNCONSTRAINED``.
        axes: names and sizes of the mesh of ``spec``, if it came with one.
        devices: the devices of that mesh in row-major order, if it has any.
        unreduced: the mesh axes over which the value is in parts, to be combined by ``monoid``.
        monoid: ``add``, ``max`` or ``min``.
        reduced: the mesh axes over which the cotangent is in parts of a sum; the value itself is whole there.
        batch_dims: dimensions that vmap added, in the order they were added; they stay open.
        even: whether parts must be equal, as JAX has it of the result of a program.
        leaf: which leaf of a pytree was marked, for messages: ``x['l1']['w']``.
        names: what the user calls the dimensions, where a layout made this mark.
        said: what the user wrote, where that is not in the other words of the mark.
    """

    kind: str
    dim: int = 0
    partitions: int | str | tuple[str, ...] = 1
    ids: tuple[int, ...] = ()
    ids_shape: tuple[int, ...] = ()
    spec: tuple[Any, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()
    devices: tuple[Any, ...] = ()
    unreduced: tuple[str, ...] = ()
    monoid: str = "add"
    reduced: tuple[str, ...] = ()
    batch_dims: tuple[int, ...] = ()
    even: bool = False
    leaf: str = dataclasses.field(default="", compare=False, repr=False)
    names: tuple[str | None, ...] = dataclasses.field(default=(), compare=False, repr=False)
    said: str = dataclasses.field(default="", compare=False, repr=False)

    def with_batch_dimension(self, dim: int) -> Mark:
        """The same mark on an array that has one more dimension, at ``dim``."""
        return dataclasses.replace(self, batch_dims=(*self.batch_dims, dim))

    @property
    def transposed(self) -> Mark:
        """The mark of the cotangent: over axes where the value is in parts it is whole, and the other way round."""
        if not self.unreduced and not self.reduced:
            return self
        return dataclasses.replace(self, unreduced=self.reduced, monoid="add", reduced=self.unreduced)

    def place(self, dims: list[Any], open_dim: Any) -> list[Any]:
        """Puts ``open_dim`` where vmap added dimensions into a list that has one entry for each other dimension."""
        dims = list(dims)
        for position in self.batch_dims:
            dims.insert(position, open_dim)
        return dims

    def __str__(self) -> str:
        if self.said:
            return self.said
        match self.kind:
            case "replicate":
                return "replicate(x)"
            case "split":
                return f"split(x, {self.dim}, {self.partitions!r})"
            case "assignment":
                return f"shard(x, ids of shape {self.ids_shape})"
            case _:
                return f"shard(x, {self.spec_text})"

    def is_foreign(self, mesh: Mesh) -> bool:
        """Whether it came with another mesh than this one, on whose axes it is read by its devices."""
        return bool(self.axes) and self.axes not in (mesh.axes, tuple(mesh.atom_sizes.items()))

    def text_on(self, mesh: Mesh) -> str:
        """The mark as text; with the axes of its own mesh, if that is another one."""
        return f"{self} on a mesh of {_axes(self.axes)}" if self.is_foreign(mesh) else str(self)

    @property
    def spec_text(self) -> str:
        """The source text of this mark's ``PartitionSpec``."""
        axes = (("unreduced", self.unreduced), ("reduced", self.reduced))
        return text_of_spec(self.spec, axes, "" if self.monoid == "add" else self.monoid)


def mark_of_cut(dims: Sequence[Atoms | None], mesh: Mesh) -> Mark:
    """The mark that cuts each dimension over these atoms of a mesh: whole over none, open for None.

    >>> mesh = Mesh.abstract(devices=8)
    >>> resolve(mark_of_cut((("devices.1",), ()), mesh), mesh, (6, 8), "").dims
    (('devices.1',), ())
    """
    spec = tuple(PartitionSpec.UNCONSTRAINED if atoms is None else tuple(atoms) or None for atoms in dims)
    return Mark("spec", spec=spec, axes=tuple(mesh.atom_sizes.items()))


def _axes(axes: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name}={size}" for name, size in axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What a mark asks for on a mesh.

    Attributes:
        dims: atoms for each dimension.
        open: which dimensions it leaves open.
        order: the order of the devices in which it does; the mesh's own wherever that will do.
        unreduced: atoms over which the value is in parts, each with the monoid that combines them.
    """

    dims: tuple[Atoms, ...]
    open: tuple[bool, ...]
    order: Order = ()
    unreduced: tuple[tuple[str, str], ...] = ()

    @property
    def sharding(self) -> Sharding:
        """The sharding that it asks for, where open dimensions are whole."""
        return Sharding(self.dims, self.unreduced)

    def allows(self, sharding: Sharding) -> bool:
        """Whether a sharding is what it asks for."""
        dims = zip(sharding.dims, self.dims, self.open, strict=True)
        return sharding.unreduced == self.unreduced and all(is_open or have == own for have, own, is_open in dims)


def resolve(mark: Mark, mesh: Mesh, shape: tuple[int, ...], line: str) -> Demand:
    """What a mark means for an array of this shape on this mesh.

    Raises:
        ShardingError: the mesh has no such axis or device, an axis is used twice, or the numbers do not fit.
    """
    ndim, order = len(shape) - len(mark.batch_dims), mesh.order
    try:
        match mark.kind:
            case "replicate":
                dims: list[Atoms | None] = [()] * ndim
            case "split":
                dims = [()] * ndim
                dims[mark.dim] = atoms_of_partitions(mark.partitions, mesh)
            case "assignment":
                dims, order = _assignment(mark, mesh)
            case _:
                dims, order = _spec(mark, mesh, ndim)
        if mark.names:
            _check_names(mark, dims)
        _check_once(dims, mesh)
        unreduced = _unfinished(mark, dims, mesh)
        placed = mark.place(dims, None)
        if mark.even:
            _check_even(placed, shape, mesh)
    except ShardingError as reason:
        which = f"{mark.leaf}: " if mark.leaf else ""
        named = f"NamedSharding of JAX's over {_axes(mark.axes)}: {mark.spec_text}"
        said = named if mark.axes and not mark.said else str(mark)
        got = f"{which}{_text(shape)}, {said}; mesh: {mesh}{'; ' + reason.got if reason.got else ''}"
        raise ShardingError(reason.what, line, got, reason.hint) from None
    return Demand(tuple(d or () for d in placed), tuple(d is None for d in placed), order, unreduced)


def _text(shape: tuple[int, ...]) -> str:
    return f"array of shape [{','.join(map(str, shape))}]"


def atoms_of_partitions(partitions: int | str | tuple[str, ...], mesh: Mesh) -> Atoms:
    """The atoms that cut a dimension in so many parts, or along these axes."""
    if not isinstance(partitions, int):
        names = (partitions,) if isinstance(partitions, str) else partitions
        return tuple(a for name in names for a in _axis(name, mesh))
    if partitions > mesh.size:
        raise ShardingError(
            f"{partitions} partitions were asked for, and the mesh has {mesh.size} devices.",
            hint=f"Use at most {mesh.size} partitions.",
        )
    # Major atoms first, so that the copies of a part are on consecutive devices; any others if that fits alone.
    chosen: list[str] = []
    wanted = partitions
    for atom, size in mesh.atom_sizes.items():
        if wanted % size == 0:
            chosen.append(atom)
            wanted //= size
    if wanted != 1:
        fitting = sorted(n for n in range(1, mesh.size + 1) if mesh.size % n == 0)
        raise ShardingError(
            f"{mesh.size} devices cannot hold {partitions} partitions in equal numbers of copies.",
            hint=f"Use one of {', '.join(map(str, fitting))} partitions.",
        )
    return tuple(chosen)


def _axis(name: str, mesh: Mesh) -> Atoms:
    if name in mesh.atoms_of:
        return mesh.atoms_of[name]
    if name in mesh.atom_sizes:
        return (name,)
    raise ShardingError(f"the mesh has no axis {name!r}.", hint=known_names(name, mesh.atoms_of))


def _named(mark: Mark, mesh: Mesh, ndim: int) -> list[tuple[str, ...] | None]:
    """For each dimension the axes it is cut over; None where that is open. Axes of one device cut nothing."""
    of_one_device = {name for name, size in mark.axes if size == 1}

    def axes(entry: Any) -> tuple[str, ...] | None:
        if entry is PartitionSpec.UNCONSTRAINED:
            return None
        if isinstance(entry, int):
            return atoms_of_partitions(entry, mesh)
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return tuple(name for name in names if name not in of_one_device)

    return [axes(entry) for entry in (*mark.spec, *(None,) * (ndim - len(mark.spec)))]


def _spec(mark: Mark, mesh: Mesh, ndim: int) -> tuple[list[Atoms | None], Order]:
    named = _named(mark, mesh, ndim)
    ours = mesh.order_of(mark.devices)
    known = all(mesh.atoms_of.get(n, (n,)) and mesh.count(_axis_or_none(n, mesh)) == s for n, s in mark.axes)
    # Axes of the same names and sizes are along other devices if they come in another order.
    in_order = tuple(a for n, _ in mark.axes for a in _axis_or_none(n, mesh)) == mesh.atoms
    by_name = known and (in_order or not mark.devices)
    if by_name and ours == mesh.order:
        return [None if dim is None else tuple(a for n in dim for a in _axis(n, mesh)) for dim in named], ours
    dims = [dim or () for dim in named]
    if by_name:  # by the atoms, since a name may be one of an atom's
        dims = [tuple(a for n in dim for a in _axis(n, mesh)) for dim in dims]
    axes = tuple(mesh.atom_sizes.items()) if by_name else mark.axes
    if math.prod(size for _, size in axes) != mesh.size:
        raise ShardingError(
            f"a sharding over {math.prod(size for _, size in axes)} devices cannot be one over {mesh.size}.",
            hint="Make its jax.sharding.Mesh of the devices of the program.",
        )
    _check_once([*dims], mesh)
    cuts, order = _found(table_of_axes(dims, axes, ours or range(mesh.size)), mesh)
    if not any(cuts):  # whole on every device: in the order in which it names them
        order = ours
    return [None if dim is None else atoms for dim, atoms in zip(named, cuts, strict=True)], order


def _unfinished(mark: Mark, dims: Sequence[Atoms | None], mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """The atoms over which a value is in parts, and the monoid.

    Raises:
        ShardingError: the mesh has no such axis, or it splits a dimension.
    """
    of_one_device = {name for name, size in mark.axes if size == 1}
    names = [name for name in (*mark.unreduced, *mark.reduced) if name not in of_one_device]
    atoms_of = {name: _along(name, mark, mesh) for name in names}
    cutting = {a: d for d, atoms in enumerate(dims) for a in atoms or ()}
    for name in names:
        for a in atoms_of[name]:
            if a in cutting:
                word = "unreduced" if name in mark.unreduced else "reduced"
                what = f"axis {name!r} splits dimension {cutting[a]}, and is {word}."
                raise ShardingError(what, hint="Name each mesh axis once.")
    wanted = (name for name in names if name in mark.unreduced)
    return tuple(sorted((a, mark.monoid) for name in wanted for a in atoms_of[name]))


def _along(name: str, mark: Mark, mesh: Mesh) -> Atoms:
    """The atoms of one axis of a mark: by its name, or by the devices along it if its mesh is another one."""
    size = dict(mark.axes).get(name)
    if size is None or mesh.count(_axis_or_none(name, mesh)) == size:
        return _axis(name, mesh)
    if math.prod(n for _, n in mark.axes) == mesh.size:
        cuts = cut(table_of_axes([(name,)], mark.axes, mesh.order_of(mark.devices) or range(mesh.size)), mesh)
        if cuts is not None:
            return cuts[0]
    raise ShardingError(
        f"no axes of the mesh are the {size} devices along axis {name!r}.",
        hint="Name unreduced and reduced axes of the mesh that the program is partitioned for.",
    )


def _axis_or_none(name: str, mesh: Mesh) -> Atoms:
    return mesh.atoms_of.get(name) or ((name,) if name in mesh.atom_sizes else ())


def _assignment(mark: Mark, mesh: Mesh) -> tuple[list[Atoms | None], Order]:
    cuts, order = _found(table_of_ids(np.asarray(mark.ids, dtype=np.int64).reshape(mark.ids_shape), mesh), mesh)
    return list(cuts), order


def _found(table: np.ndarray, mesh: Mesh) -> tuple[tuple[Atoms, ...], Order]:
    """A cut in the mesh's own order of devices if there is one, else in the order that the table needs."""
    cuts = cut(table, mesh)
    return (cuts, mesh.order) if cuts is not None else order_for(table, mesh)


def _check_names(mark: Mark, dims: list[Atoms | None]) -> None:
    """Refuses two dimensions that want one axis by their names, also where the axis has one device."""
    seen: dict[str, int] = {}
    for d, (entry, atoms) in enumerate(zip(mark.spec, dims, strict=True)):
        axes = entry if isinstance(entry, tuple) else ()
        for one in dict.fromkeys((*axes, *(atoms or ()))):
            if (first := seen.setdefault(one, d)) == d:
                continue
            what = f"axis {one!r}" if one in axes else f"{entry} parts: the same devices"
            if mark.names[first] == mark.names[d]:
                said = f"dimensions {first} and {d} are both called {mark.names[d]!r} and want {what}."
            else:
                both = f"{mark.names[first]!r} (dimension {first}) and {mark.names[d]!r} (dimension {d})"
                said = f"{both} both want {what}."
            raise ShardingError(
                said,
                hint="An axis splits one dimension of an array: give one row of the layout another axis or None, "
                "or write '_' for one of the names here.",
            )


def _check_once(dims: list[Atoms | None], mesh: Mesh) -> None:
    seen: dict[str, int] = {}
    for d, atoms in enumerate(dims):
        for atom in atoms or ():
            if atom in seen:
                where = f"dimension {d} twice" if seen[atom] == d else f"dimensions {seen[atom]} and {d}"
                axis = next((n for n, own in mesh.atoms_of.items() if atom in own), atom)
                raise ShardingError(f"axis {axis!r} splits {where}.", hint="Name each mesh axis once.")
            seen[atom] = d


def _check_even(dims: list[Atoms | None], shape: tuple[int, ...], mesh: Mesh) -> None:
    for d, (n, atoms) in enumerate(zip(shape, dims, strict=True)):
        if n % (parts := mesh.count(atoms or ())):
            raise ShardingError(
                f"dimension {d} of a result has {n} elements, which cannot leave in {parts} equal parts.",
                hint='Give a spec that divides it, leave it open, or take padded parts with uneven="keep".',
            )
