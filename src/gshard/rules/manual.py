"""Manual regions: parts of a program that the user has already partitioned, and their boundary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from gshard.comm.shards import Shards
from gshard.core.errors import ShardingError
from gshard.core.mark import Mark, resolve
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.rule import Manual, Rule, RuleMaker, Split
from gshard.language.per_device import MANUAL_COLLECTIVES, Collective, RegionBoundary, renamed
from gshard.language.per_device import collective as run_collective
from gshard.language.registry import Call, rule


@rule("shard_map")
def shard_map(call: Call) -> Rule:
    """The spec of an array determines its split. Each array has its own factors, because the body is opaque.

    gshard has already opened a ``shard_map`` with automatic axes (``tracing.partly_manual``), unless these axes have
    one device each.
    """
    user_mesh, body = call.params["mesh"], call.params["jaxpr"]
    axes, devices = axes_of_mesh(user_mesh)
    specs = (*call.params["in_specs"], *call.params["out_specs"])
    make = RuleMaker()
    operands = [make.parallel(shape) for shape in call.in_shapes]
    results = [make.parallel(shape) for shape in call.out_shapes]

    def fixed(mesh: Mesh) -> Split:
        check_devices(axes, devices, mesh)
        split: Split = {}
        for dims, spec, shape in zip((*operands, *results), specs, (*call.in_shapes, *call.out_shapes), strict=True):
            split |= _split(dims, spec, axes, mesh, shape)
        return split

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        return shards.run_program(renamed(body, atoms_of_axes(axes, shards.mesh)), arrays)

    return make.rule(operands, results, local=local, fixed=fixed)


def axes_of_mesh(mesh: Any) -> tuple[tuple[tuple[str, int], ...], tuple[Any, ...]]:
    """Names and sizes of the axes of a JAX mesh, and its devices in row-major order; () for an abstract mesh."""
    devices = tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else ()
    return tuple((str(name), int(size)) for name, size in mesh.shape.items()), devices


def check_devices(axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...], mesh: Mesh) -> None:
    """Refuses a ``shard_map`` over a mesh that is not the program's."""
    differ = bool(devices) and mesh.devices is not None and devices != mesh.devices
    if math.prod(size for _, size in axes) != mesh.size or differ:
        raise ShardingError(
            "a shard_map inside the program is over other devices than the program.",
            got=f"its mesh: {dict(axes)}; the program's: {mesh}",
            hint="Make both over the same devices in the same order.",
        )


@tabulated(64)
def atoms_of_axes(axes: tuple[tuple[str, int], ...], mesh: Mesh) -> Mapping[str, Atoms]:
    """The atoms of each axis of the user's mesh."""
    return {name: cuts_of((name,), axes, mesh, (mesh.size,))[0] for name, _ in axes}


def _split(dims: Any, spec: Any, axes: tuple[tuple[str, int], ...], mesh: Mesh, shape: tuple[int, ...]) -> Split:
    """The split of the factors of an array that a spec over the user's axes states."""
    cuts = cuts_of(tuple(spec), axes, mesh, shape)
    return {dim[0]: atoms for dim, atoms in zip(dims, cuts, strict=True) if atoms}


def cuts_of(
    spec: tuple[Any, ...], axes: tuple[tuple[str, int], ...], mesh: Mesh, shape: tuple[int, ...]
) -> tuple[Atoms, ...]:
    """The atoms that cut each dimension of an array, by a spec over the axes of another mesh of the same devices."""
    demand = resolve(Mark(spec=spec, axes=axes), mesh, shape, "")
    if demand.order != mesh.order:
        raise ShardingError(
            "a mesh inside the program cuts its devices otherwise than the axes of the program's mesh do.",
            got=f"its mesh: {dict(axes)}; the program's: {mesh}",
            hint="Make both over the same mesh.",
        )
    return demand.dims


# The boundary of a ``shard_map`` that is manual over some axes, and the collectives inside it.

Dims = list[tuple[int, ...]]

_EQUAL = ("psum", "pmax", "pmin", "all_gather")  # collectives whose result is the same on all devices


@rule("enter_manual", "leave_manual")
def boundary(call: Call) -> Rule:
    """A whole array, and its part at one position along the manual axes. Addends leave as parts of an unreduced array.

    >>> from gshard.core.mesh import Mesh
    >>> at = RegionBoundary((("a", 2), ("b", 4)), ("a",), (("a",), ()))
    >>> rule = boundary(Call("enter_manual", {"boundary": at}, ((8, 3),), ((4, 3),), ("f4",)))
    >>> print(rule, rule.manual.pinned(Mesh.abstract(a=2, b=4)))
    (a b) c -> b c {0: ('a',)}
    """
    at: RegionBoundary = call.params["boundary"]
    enters = call.name == "enter_manual"
    (inside,) = call.out_shapes if enters else call.in_shapes
    make = RuleMaker()
    whole: Dims = []
    part: Dims = []
    axes_of: dict[int, tuple[str, ...]] = {}  # the manual axes of each factor of parts
    for n, parts, axes in zip(inside, at.parts(), at.spec, strict=True):
        between = make.factor(parts) if parts > 1 else ()
        within = make.factor(n)
        axes_of.update(dict.fromkeys(between, axes))
        whole.append((*between, *within))
        part.append(within)

    def manual_atoms(mesh: Mesh) -> frozenset[str]:
        check_devices(at.axes, at.devices, mesh)
        return frozenset(_atoms(at.manual, at.axes, mesh))

    def pinned(mesh: Mesh) -> Split:
        return {f: _atoms(axes, at.axes, mesh) for f, axes in axes_of.items()}

    def differ(mesh: Mesh) -> frozenset[str]:
        return frozenset(a for atoms in pinned(mesh).values() for a in atoms) if enters else frozenset()

    operand, result = (whole, part) if enters else (part, whole)
    step = Manual("enter" if enters else "leave", manual_atoms, pinned, differ)
    return make.rule([operand], [result], local=lambda shards, x: [x], flops=0, manual=step)


def _atoms(names: Iterable[str], axes: tuple[tuple[str, int], ...], mesh: Mesh) -> Atoms:
    """The atoms of some axes of the user's mesh."""
    atoms_of = atoms_of_axes(axes, mesh)
    return tuple(a for name in names for a in atoms_of[name])


@rule(*(p.name for p in MANUAL_COLLECTIVES.values()))
def collective(call: Call) -> Rule:
    """A collective over manual axes, which all devices with the same position along the other axes run unchanged.

    >>> from jax.extend.core import Primitive
    >>> psum = Collective(Primitive("psum"), (("axes", ("a",)),), ("a",), (("a", 2),), ("a",), ())
    >>> print(collective(Call("manual_psum", {"collective": psum}, ((8, 3),), ((8, 3),), ("f4",))))
    a b -> a b
    """
    original: Collective = call.params["collective"]
    name, params = call.name.removeprefix("manual_"), dict(original.params)
    make = RuleMaker()
    operands, results = _dims(name, params, make, call)

    def over(mesh: Mesh) -> Atoms:
        return _atoms(original.over, original.axes, mesh)

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        atoms = over(shards.mesh)
        return shards.run_program(lambda *xs: run_collective(original.primitive, name, params, atoms, list(xs)), arrays)

    def manual_atoms(mesh: Mesh) -> frozenset[str]:
        return frozenset(_atoms(original.manual, original.axes, mesh))

    def along(mesh: Mesh) -> frozenset[str]:
        return frozenset(over(mesh))

    def nowhere(mesh: Mesh) -> frozenset[str]:
        return frozenset()

    differ = along if name == "axis_index" else nowhere
    equal = along if name in _EQUAL and not params.get("axis_index_groups") else nowhere
    inside = Manual("inside", manual_atoms, lambda mesh: {}, differ, equal)
    # The parts of a sum over automatic axes may first be added over manual axes.
    linear = [("add", (0,))] if name == "psum" and len(operands) == 1 else []
    return make.rule(operands, results, local=local, linear=linear, manual=inside)


def _dims(name: str, params: dict[str, Any], make: RuleMaker, call: Call) -> tuple[list[Dims], list[Dims]]:
    """The dimensions of operands and results. Those along which parts are concatenated or cut cannot be split."""
    keys = ("split_axis", "concat_axis", "all_gather_dimension", "scatter_dimension")
    exchanged = {params[key] for key in keys if key in params}
    if name == "ragged_all_to_all":
        row = make.parallel(call.in_shapes[0][1:])
        rows, out_rows = make.replicate(call.in_shapes[0][0]), make.replicate(call.in_shapes[1][0])
        offsets_and_sizes: list[Dims] = [[make.replicate(n) for n in shape] for shape in call.in_shapes[2:]]
        return [[rows, *row], [out_rows, *row], *offsets_and_sizes], [[out_rows, *row]]
    if name not in ("all_gather", "reduce_scatter", "all_to_all"):
        arrays: list[Dims] = [make.parallel(shape) for shape in call.in_shapes]
        return arrays, arrays if arrays else [[]]
    (shape,), (result,) = call.in_shapes, call.out_shapes
    if len(shape) == len(result):
        parallel = {d: make.factor(n) for d, n in enumerate(shape) if d not in exchanged}
        operand_dims = [parallel[d] if d in parallel else make.replicate(n) for d, n in enumerate(shape)]
        result_dims = [parallel[d] if d in parallel else make.replicate(n) for d, n in enumerate(result)]
        return [operand_dims], [result_dims]
    (d,) = exchanged
    shorter, longer = sorted((shape, result), key=len)
    kept = make.parallel(shorter)
    with_parts: Dims = [*kept[:d], make.replicate(longer[d]), *kept[d:]]
    return ([kept], [with_parts]) if name == "all_gather" else ([with_parts], [kept])
