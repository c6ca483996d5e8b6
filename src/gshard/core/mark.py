"""Defines marks, the user's sharding constraints, resolves them on a mesh, and converts them from and to JAX's specs.

Marks that name devices become shardings and an order of devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from gshard.core.errors import ShardingError, known_names
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding

# Converts marks that name devices to shardings and device orders.

Order = tuple[int, ...]  # the device at each position; () as the mesh came


def table_of_ids(ids: np.ndarray, mesh: Mesh) -> np.ndarray:
    """The devices of each part, for a mark that is an array of device ids.

    If there are fewer ids than devices, several consecutive devices hold each part.
    """
    count = ids.size
    if not count or mesh.size % count or set(ids.flat) != set(range(count)):
        raise ShardingError(
            f"a device assignment of {count} parts does not fit {mesh.size} devices.",
            got=f"device ids {ids.tolist()}"[:200],
            hint="Name each of the devices 0 to n-1 once, where n divides the number of devices.",
        )
    copies = mesh.size // count
    return ids[..., None] * copies + np.arange(copies)


def table_of_axes(dims: Sequence[Sequence[str]], axes: Sequence[tuple[str, int]], devices: Sequence[int]) -> np.ndarray:
    """The devices of each part, for dimensions that are split over named axes of a grid of devices."""
    names = [name for name, _ in axes]
    sizes = [size for _, size in axes]
    split_axes = [names.index(name) for dim in dims for name in dim]
    other_axes = [i for i in range(len(names)) if i not in split_axes]
    grid = np.asarray(devices).reshape(sizes).transpose([*split_axes, *other_axes])
    parts = [math.prod(sizes[names.index(name)] for name in dim) for dim in dims]
    return grid.reshape([*parts, -1])


def cut(table: np.ndarray, mesh: Mesh) -> tuple[Atoms, ...] | None:
    """The atoms that split each dimension such that each device holds the parts that the table gives it.

    None if no split over atoms does this.
    """
    positions = _positions(mesh)[table]
    first = positions.min(axis=-1)
    dims: list[Atoms] = []
    for d in range(first.ndim):
        along_d = tuple(slice(None) if i == d else 0 for i in range(first.ndim))
        atoms = _atoms_along(first[along_d], mesh)
        if atoms is None or any(set(atoms) & set(dim) for dim in dims):
            return None
        dims.append(atoms)
    return tuple(dims) if np.array_equal(np.sort(positions), positions_of_parts(tuple(dims), mesh)) else None


def order_for(table: np.ndarray, mesh: Mesh) -> tuple[tuple[Atoms, ...], Order]:
    """A split over atoms, and the device order in which this split gives each device its parts of the table."""
    free_atoms = list(mesh.atoms)
    dims: list[Atoms] = []
    for parts in table.shape[:-1]:
        atoms: list[str] = []
        for atom in list(free_atoms):
            if parts % mesh.atom_sizes[atom] == 0:
                parts //= mesh.atom_sizes[atom]
                atoms.append(atom)
                free_atoms.remove(atom)
        dims.append(tuple(atoms))
    order = np.empty(mesh.size, np.int64)
    order[positions_of_parts(tuple(dims), mesh)] = np.sort(table)
    return tuple(dims), tuple(map(int, order))


def _positions(mesh: Mesh) -> np.ndarray:
    """The position of each device."""
    return np.argsort(mesh.order) if mesh.order else np.arange(mesh.size)


@tabulated(1024)
def positions_of_parts(dims: tuple[Atoms, ...], mesh: Mesh) -> Any:
    """The positions that hold each part, in rising order: an array of shape ``[*parts, copies]``."""
    return np.sort(table_of_axes(dims, tuple(mesh.atom_sizes.items()), range(mesh.size)))


def _atoms_along(positions: np.ndarray, mesh: Mesh) -> Atoms | None:
    """The atoms, major to minor, whose positions are exactly these positions; None if there are none."""
    atom_of_stride: dict[int, str] = {}
    stride = 1
    for atom in reversed(mesh.atoms):
        atom_of_stride[stride] = atom
        stride *= mesh.atom_sizes[atom]
    atoms: list[str] = []
    reached = positions[:1]  # the positions along the atoms so far, minor atoms fastest
    while len(reached) < len(positions):
        step = int(positions[len(reached)] - positions[0])
        next_atom = atom_of_stride.get(step)
        if next_atom is None or next_atom in atoms:
            return None
        atoms.insert(0, next_atom)
        reached = np.concatenate([reached + k * step for k in range(mesh.atom_sizes[next_atom])])
    return tuple(atoms) if np.array_equal(reached, positions) else None


def permutation(dims: tuple[Atoms, ...], order: Order, mesh: Mesh) -> list[tuple[int, int]]:
    """The sender and receiver pairs that move an array from another device order to the order of the mesh.

    Devices that already hold the part that they need keep it.
    """
    new_positions = _positions(mesh)[np.asarray(order or range(mesh.size))]  # of the devices of ``order``
    parts = positions_of_parts(dims, mesh)
    pairs: list[tuple[int, int]] = []
    for receivers in parts.reshape(-1, parts.shape[-1]):
        holders = set(map(int, new_positions[receivers]))
        keepers = holders & set(map(int, receivers))
        pairs += [(position, position) for position in keepers]
        pairs += itertools.zip_longest(sorted(holders - keepers), (int(p) for p in receivers if p not in keepers))
    return sorted(pairs)


# Converts JAX's ``PartitionSpec`` to the entries of a mark and to text.

_KINDS = {"sum": "add", "max": "max", "min": "min"}


def entries_of(spec: PartitionSpec, line: str = "") -> tuple[Any, ...]:
    """The entries of a ``PartitionSpec`` without unreduced or reduced axes."""
    for kind in ("unreduced", "reduced"):
        if getattr(spec, kind, None):
            raise ShardingError(
                f"{kind} axes cannot be asked for here.",
                line,
                str(spec),
                "Mark the value inside of the function: x = gshard.shard(x, P(..., unreduced={...})).",
            )
    return words_of(spec, line)[0]


def words_of(spec: PartitionSpec, line: str = "") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The entries of a ``PartitionSpec``, and its unreduced and reduced axes as attributes of a ``Mark``.

    >>> words_of(PartitionSpec("data", None, unreduced={"model"}))
    (('data', None), {'unreduced': ('model',)})
    """
    for entry in spec.partitions:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            continue
        names = entry if isinstance(entry, tuple | list) else (entry,)
        if not all(isinstance(n, str) for n in names):
            raise ShardingError(
                f"{entry!r} is no name of a mesh axis.",
                line,
                str(spec),
                "Give for each dimension an axis name, a tuple of them, None (whole) or P.UNCONSTRAINED (open).",
            )
    attributes: dict[str, Any] = {}
    for word in ("unreduced", "reduced"):
        if axes := getattr(spec, word, None):
            attributes[word] = tuple(sorted(map(str, axes)))
    if "unreduced" in attributes:
        kind = str(getattr(spec, "unreduced_kind", None) or "sum").rsplit(".", 1)[-1].lower()  # newer JAX has several
        if kind not in _KINDS:
            raise ShardingError(
                f"parts cannot be combined by {kind!r}.", line, str(spec), f"Use one of {', '.join(_KINDS)}."
            )
        if _KINDS[kind] != "add":
            attributes["monoid"] = _KINDS[kind]
    return tuple(spec.partitions), attributes


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a ``PartitionSpec``; none of None and of ``UNCONSTRAINED``.

    >>> [axes_of_entry(entry) for entry in PartitionSpec("data", None, ("x", "y"))]
    [('data',), (), ('x', 'y')]
    """
    return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple | list) else ()


def spec_of_axes(axes_of_dims: Iterable[Sequence[str]]) -> PartitionSpec:
    """The ``PartitionSpec`` that splits each dimension over these axes."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else tuple(axes) or None for axes in axes_of_dims))


def text_of_spec(
    entries: Iterable[Any], axes: Iterable[tuple[str, Collection[str]]] = (), unreduced_kind: str = ""
) -> str:
    """The source text of a ``PartitionSpec``."""
    arguments = [repr(entry) for entry in entries]
    arguments += [f"{keyword}={{{', '.join(map(repr, names))}}}" for keyword, names in axes if names]
    if unreduced_kind:
        arguments.append(f"unreduced_kind={unreduced_kind}")
    return f"P({', '.join(arguments)})"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a pipeline."""

    over: int | str | tuple[str, ...]  # the mesh axes, or the number of parts, over which the stages are split
    micro_batches: int  # the number of parts of the batch
    rounds: int = 1  # how often each micro-batch passes all stages. In each round a stage runs other layers.

    def turns(self, stages: int) -> int:
        """The number of turns: in each turn every stage processes one micro-batch, or repeats one (the bubble)."""
        return self.micro_batches * self.rounds + stages - 1

    def bubble(self, stages: int) -> float:
        """The part of the turns in which a stage repeats a micro-batch.

        >>> Schedule("stage", micro_batches=6).bubble(stages=3)
        0.25
        """
        return (stages - 1) / self.turns(stages)

    def __str__(self) -> str:
        rounds = f", rounds={self.rounds}" if self.rounds > 1 else ""
        return f"pipeline(x, {self.over!r}, micro_batches={self.micro_batches}{rounds})"


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """One sharding constraint: a call of ``replicate``, ``split`` or ``shard``, or a sharding of JAX."""

    # for each dimension None (whole, as further dimensions are), an axis name, a tuple of names, a number of parts, or
    # ``PartitionSpec.UNCONSTRAINED``; without the dimensions that vmap added
    spec: tuple[Any, ...] = ()
    ids: tuple[int, ...] | None = None  # instead of ``spec``: device ids in row-major order
    ids_shape: tuple[int, ...] = ()  # number of parts along each dimension
    # names and sizes of the axes of the mesh to which ``spec`` refers, if it has its own mesh
    axes: tuple[tuple[str, int], ...] = ()
    devices: tuple[Any, ...] = ()  # the devices of this mesh in row-major order, if it has devices
    # the mesh axes over which the value is unreduced: each device holds a part for ``monoid``
    unreduced: tuple[str, ...] = ()
    monoid: str = "add"  # ``add``, ``max`` or ``min``
    # the mesh axes over which the cotangent is unreduced (parts of a sum). The value is whole over them.
    reduced: tuple[str, ...] = ()
    batch_dims: tuple[int, ...] = ()  # dimensions that vmap added, in the order they were added; they stay open
    even: bool = False  # whether all parts must have the same size, as JAX requires for the results of a program
    # the marked leaf of a pytree, for messages: ``x['l1']['w']``
    leaf: str = dataclasses.field(default="", compare=False, repr=False)
    # the user's source text, if the other attributes do not contain it
    source_text: str = dataclasses.field(default="", compare=False, repr=False)
    # the dtype in which devices send the array; empty if it is that of the array
    send: str = dataclasses.field(default="", repr=False)
    wide: str = dataclasses.field(default="", repr=False)  # the dtype of the array that is sent like this
    # the pipeline in which loops over this stack run; None if it is no stack of a pipeline
    schedule: Schedule | None = dataclasses.field(default=None, repr=False)

    @property
    def transposed(self) -> Mark:
        """The mark of the cotangent, which is whole over axes where the value is unreduced, and the reverse."""
        if not self.unreduced and not self.reduced:
            return self
        return dataclasses.replace(self, unreduced=self.reduced, monoid="add", reduced=self.unreduced)

    def place(self, dims: list[Any], open_dim: Any) -> list[Any]:
        """Inserts ``open_dim`` for each dimension that vmap added into a list of entries of the other dimensions."""
        dims = list(dims)
        for position in self.batch_dims:
            dims.insert(position, open_dim)
        return dims

    def __str__(self) -> str:
        given = f"ids of shape {self.ids_shape}" if self.ids is not None else self.spec_text
        call = self.source_text or f"shard(x, {given})"
        return f"{call.removesuffix(')')}, send={self.send!r})" if self.send else call

    def is_foreign(self, mesh: Mesh) -> bool:
        """Whether the mark refers to another mesh. gshard then resolves it by its devices."""
        return bool(self.axes) and self.axes not in (mesh.axes, tuple(mesh.atom_sizes.items()))

    def text_on(self, mesh: Mesh) -> str:
        """The mark as text, with the axes of its own mesh if it refers to another mesh."""
        return f"{self} on a mesh of {_axes(self.axes)}" if self.is_foreign(mesh) else str(self)

    @property
    def spec_text(self) -> str:
        """The source text of this mark's ``PartitionSpec``."""
        axes = (("unreduced", self.unreduced), ("reduced", self.reduced))
        return text_of_spec(self.spec, axes, "" if self.monoid == "add" else self.monoid)


REPLICATED = Mark(source_text="replicate(x)")


def mark_of_split(dim: int, partitions: int | str | tuple[str, ...], leaf: str = "") -> Mark:
    """The mark that splits one dimension over mesh axes or into a number of parts."""
    return Mark((*(None,) * dim, partitions), leaf=leaf, source_text=f"split(x, {dim}, {partitions!r})")


def mark_of_stack(schedule: Schedule, ndim: int, leaf: str = "") -> Mark:
    """The mark of stacked layers. In several rounds a stage has layers that are apart, so the stack stays open."""
    first = schedule.over if schedule.rounds == 1 else PartitionSpec.UNCONSTRAINED
    spec = (first, *(PartitionSpec.UNCONSTRAINED,) * (ndim - 1))
    return Mark(spec=spec, leaf=leaf, source_text=str(schedule), schedule=schedule)


def mark_of_cut(dims: Sequence[Atoms | None], mesh: Mesh) -> Mark:
    """The mark that splits each dimension over these atoms of a mesh. None leaves a dimension open.

    >>> mesh = Mesh.abstract(devices=8)
    >>> resolve(mark_of_cut((("devices.1",), ()), mesh), mesh, (6, 8), "").dims
    (('devices.1',), ())
    """
    spec = tuple(PartitionSpec.UNCONSTRAINED if atoms is None else tuple(atoms) or None for atoms in dims)
    return Mark(spec=spec, axes=tuple(mesh.atom_sizes.items()))


def _axes(axes: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name}={size}" for name, size in axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """The sharding that a mark requires on a mesh."""

    dims: tuple[Atoms, ...]  # atoms for each dimension
    open: tuple[bool, ...]  # whether the mark leaves each dimension open
    order: Order = ()  # the device order of the sharding; the order of the mesh if that is possible
    # the atoms over which the value is unreduced, each with the monoid that combines the parts
    unreduced: tuple[tuple[str, str], ...] = ()

    @property
    def sharding(self) -> Sharding:
        """The required sharding, with whole open dimensions."""
        return Sharding(self.dims, self.unreduced)

    def allows(self, sharding: Sharding) -> bool:
        """Whether a sharding satisfies this demand."""
        if sharding.unreduced != self.unreduced:
            return False
        dims = zip(sharding.dims, self.dims, self.open, strict=True)
        return all(is_open or atoms == required for atoms, required, is_open in dims)


def resolve(mark: Mark, mesh: Mesh, shape: tuple[int, ...], line: str) -> Demand:
    """Resolves a mark for an array on a mesh."""
    ndim = len(shape) - len(mark.batch_dims)
    try:
        if mark.ids is not None:
            ids = np.asarray(mark.ids, dtype=np.int64).reshape(mark.ids_shape)
            cuts, order = _cut_and_order(table_of_ids(ids, mesh), mesh)
            dims: list[Atoms | None] = list(cuts)
        else:
            dims, order = _spec(mark, mesh, ndim)
        _check_once(dims, mesh)
        unreduced = _unreduced(mark, dims, mesh)
        placed = mark.place(dims, None)
        if mark.even:
            _check_even(placed, shape, mesh)
    except ShardingError as reason:
        leaf = f"{mark.leaf}: " if mark.leaf else ""
        named_sharding = f"NamedSharding of JAX's over {_axes(mark.axes)}: {mark.spec_text}"
        mark_text = named_sharding if mark.axes and not mark.source_text else str(mark)
        got = f"{leaf}{_text(shape)}, {mark_text}; mesh: {mesh}{'; ' + reason.got if reason.got else ''}"
        raise ShardingError(reason.what, line, got, reason.hint) from None
    return Demand(tuple(d or () for d in placed), tuple(d is None for d in placed), order, unreduced)


def _text(shape: tuple[int, ...]) -> str:
    return f"array of shape [{','.join(map(str, shape))}]"


def atoms_of_partitions(partitions: int | str | tuple[str, ...], mesh: Mesh) -> Atoms:
    """The atoms that split a dimension into a number of parts, or over one or several axes."""
    if not isinstance(partitions, int):
        names = (partitions,) if isinstance(partitions, str) else partitions
        return tuple(a for name in names for a in _axis(name, mesh))
    if partitions > mesh.size:
        raise ShardingError(
            f"{partitions} partitions were asked for, and the mesh has {mesh.size} devices.",
            hint=f"Use at most {mesh.size} partitions.",
        )
    # Prefer major atoms, so that consecutive devices hold the copies of a part.
    chosen: list[str] = []
    remaining = partitions
    for atom, size in mesh.atom_sizes.items():
        if remaining % size == 0:
            chosen.append(atom)
            remaining //= size
    if remaining != 1:
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


def _axes_of_dims(mark: Mark, mesh: Mesh, ndim: int) -> list[tuple[str, ...] | None]:
    """The axes that split each dimension, without axes of one device; None for an open dimension."""
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
    """The atoms of each dimension of a ``spec`` mark (None: open), and the device order."""
    axes_of_dims = _axes_of_dims(mark, mesh, ndim)
    order_of_mark = mesh.order_of(mark.devices)
    has_axes = all(mesh.atoms_of.get(n, (n,)) and mesh.count(_axis_or_none(n, mesh)) == s for n, s in mark.axes)
    # Axes of the same names and sizes contain other devices if their order is different.
    in_order = tuple(a for n, _ in mark.axes for a in _axis_or_none(n, mesh)) == mesh.atoms
    by_name = has_axes and (in_order or not mark.devices)
    if by_name:  # convert to atoms, since a name may be the name of an atom
        axes_of_dims = [dim and tuple(a for n in dim for a in _axis(n, mesh)) for dim in axes_of_dims]
        if order_of_mark == mesh.order:
            return axes_of_dims, mesh.order
    dims = [dim or () for dim in axes_of_dims]
    axes = tuple(mesh.atom_sizes.items()) if by_name else mark.axes
    if math.prod(size for _, size in axes) != mesh.size:
        raise ShardingError(
            f"a sharding over {math.prod(size for _, size in axes)} devices cannot be one over {mesh.size}.",
            hint="Make its jax.sharding.Mesh of the devices of the program.",
        )
    _check_once([*dims], mesh)
    cuts, order = _cut_and_order(table_of_axes(dims, axes, order_of_mark or range(mesh.size)), mesh)
    if not any(cuts):  # whole on every device: keep the order of the mark
        order = order_of_mark
    return [None if axes is None else atoms for axes, atoms in zip(axes_of_dims, cuts, strict=True)], order


def _unreduced(mark: Mark, dims: Sequence[Atoms | None], mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """The atoms over which a value is unreduced, each with the monoid."""
    of_one_device = {name for name, size in mark.axes if size == 1}
    names = [name for name in (*mark.unreduced, *mark.reduced) if name not in of_one_device]
    atoms_of = {name: _along(name, mark, mesh) for name in names}
    dim_of_atom = {a: d for d, atoms in enumerate(dims) for a in atoms or ()}
    for name in names:
        for a in atoms_of[name]:
            if a in dim_of_atom:
                word = "unreduced" if name in mark.unreduced else "reduced"
                what = f"axis {name!r} splits dimension {dim_of_atom[a]}, and is {word}."
                raise ShardingError(what, hint="Name each mesh axis once.")
    unreduced_axes = (name for name in names if name in mark.unreduced)
    return tuple(sorted((a, mark.monoid) for name in unreduced_axes for a in atoms_of[name]))


def _along(name: str, mark: Mark, mesh: Mesh) -> Atoms:
    """The atoms of one axis of a mark: by name, or by the devices along the axis if the mark has another mesh."""
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


def _cut_and_order(table: np.ndarray, mesh: Mesh) -> tuple[tuple[Atoms, ...], Order]:
    """A split in the device order of the mesh if there is one, otherwise in the order that the table requires."""
    cuts = cut(table, mesh)
    return (cuts, mesh.order) if cuts is not None else order_for(table, mesh)


def _check_once(dims: list[Atoms | None], mesh: Mesh) -> None:
    seen: dict[str, int] = {}
    for d, atoms in enumerate(dims):
        for atom in atoms or ():
            if atom in seen:
                where = f"dimension {d} twice" if seen[atom] == d else f"dimensions {seen[atom]} and {d}"
                axis = next((name for name, atoms_of in mesh.atoms_of.items() if atom in atoms_of), atom)
                hint = "Name each mesh axis once: an axis splits one dimension of an array."
                raise ShardingError(f"axis {axis!r} splits {where}.", hint=hint)
            seen[atom] = d


def _check_even(dims: list[Atoms | None], shape: tuple[int, ...], mesh: Mesh) -> None:
    for d, (n, atoms) in enumerate(zip(shape, dims, strict=True)):
        if n % (parts := mesh.count(atoms or ())):
            raise ShardingError(
                f"dimension {d} of a result has {n} elements, which cannot leave in {parts} equal parts.",
                hint="Give a spec that divides it, leave it open, or pad the array.",
            )
