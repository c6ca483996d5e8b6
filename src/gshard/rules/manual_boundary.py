"""A ``shard_map`` that is manual over some axes: its boundary, and the collectives of JAX's between parts.

At the boundary each dimension that the region has in parts is a product: the parts along manual axes, and what is left
of the dimension inside. The region determines the split of the first, the plan that of the second. Inside, a collective
is an equation like others: dimensions in which it mixes nothing are split over automatic axes as the plan likes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from gshard.comm.collectives import KINDS, collectives_of, sent_bytes
from gshard.comm.shards import Shards
from gshard.core.jax_adapter import SENT_OPERANDS
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import itemsize
from gshard.core.rule import Manual, Rule, RuleMaker
from gshard.core.split import Split, place
from gshard.language.manual_primitives import MANUAL_COLLECTIVES, Collective, RegionBoundary
from gshard.language.per_device import collective as run_collective
from gshard.language.registry import Call, rule
from gshard.rules.manual import atoms_of_axes, check_devices

Dims = list[tuple[int, ...]]

_EQUAL = ("psum", "pmax", "pmin", "all_gather")  # all devices get the same result


@rule("enter_manual", "leave_manual")
def boundary(call: Call) -> Rule:
    """A whole array and the part of it that belongs to one position along the manual axes.

    >>> from gshard.core.mesh import Mesh
    >>> at = RegionBoundary((("a", 2), ("b", 4)), ("a",), (("a",), ()))
    >>> found = boundary(Call("enter_manual", {"boundary": at}, ((8, 3),), ((4, 3),), ("f4",)))
    >>> print(found, found.manual.pinned(Mesh.abstract(a=2, b=4)))
    (a b) c -> b c {0: ('a',)}
    """
    at: RegionBoundary = call.params["boundary"]
    enters = call.name == "enter_manual"
    (inside,) = call.out_shapes if enters else call.in_shapes
    make = RuleMaker()
    whole: Dims = []
    part: Dims = []
    over: dict[int, tuple[str, ...]] = {}
    for n, parts, names in zip(inside, at.parts(), at.spec, strict=True):
        between = make.factor(parts) if parts > 1 else ()
        own = make.factor(n)
        over.update(dict.fromkeys(between, names))
        whole.append((*between, *own))
        part.append(own)

    def atoms(mesh: Mesh) -> frozenset[str]:
        check_devices(at.axes, at.devices, mesh)
        of = atoms_of_axes(at.axes, mesh)
        return frozenset(a for name in at.manual for a in of[name])

    def pinned(mesh: Mesh) -> Split:
        of = atoms_of_axes(at.axes, mesh)
        return {f: tuple(a for name in names for a in of[name]) for f, names in over.items()}

    def differ(mesh: Mesh) -> frozenset[str]:
        return frozenset(a for own in pinned(mesh).values() for a in own) if enters else frozenset()

    operand, result = (whole, part) if enters else (part, whole)
    step = Manual("enter" if enters else "leave", atoms, pinned, differ)
    return make.rule([operand], [result], local=lambda shards, x: [x], flops=0, manual=step)


@rule(*(p.name for p in MANUAL_COLLECTIVES.values()))
def collective(call: Call) -> Rule:
    """A collective over manual axes: run unchanged by all devices of one position along the others.

    >>> what = Collective(jax.extend.core.Primitive("psum"), (("axes", ("a",)),), ("a",), (("a", 2),), ("a",), ())
    >>> print(collective(Call("manual_psum", {"collective": what}, ((8, 3),), ((8, 3),), ("f4",))))
    a b -> a b
    """
    what: Collective = call.params["collective"]
    name, params = call.name.removeprefix("manual_"), dict(what.params)
    make = RuleMaker()
    operands, results = _dims(name, params, make, call)

    def atoms(mesh: Mesh) -> frozenset[str]:
        of = atoms_of_axes(what.axes, mesh)
        return frozenset(a for axis in what.manual for a in of[axis])

    def over(mesh: Mesh) -> Atoms:
        of = atoms_of_axes(what.axes, mesh)
        return tuple(a for axis in what.over for a in of[axis])

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        atoms = over(shards.mesh)
        closed = jax.make_jaxpr(lambda *xs: run_collective(what.primitive, name, params, atoms, list(xs)))(*arrays)
        if shards.note is not None:
            for kind, along, sent, operand in collectives_of(closed, shards.mesh.atom_sizes):
                shards.note(kind, along, sent, operand)
        return list(jaxpr_as_fun(closed)(*arrays))

    def sends(mesh: Mesh, split: Split) -> int:
        if name not in KINDS:
            return 0
        group, sent = mesh.count(over(mesh)), 0
        arrays = list(zip(call.in_shapes, operands, call.in_dtypes, strict=True))
        for shape, dims, dtype in arrays[: SENT_OPERANDS.get(name)]:
            cuts = place(tuple(dims), split)
            each = math.prod(-(-n // mesh.count(own)) for n, own in zip(shape, cuts, strict=True)) * itemsize(dtype)
            sent += sent_bytes(KINDS[name], each, group)
        return sent

    def along(mesh: Mesh) -> frozenset[str]:
        return frozenset(over(mesh))

    def nowhere(mesh: Mesh) -> frozenset[str]:
        return frozenset()

    differ = along if name == "axis_index" else nowhere
    equal = along if name in _EQUAL and not params.get("axis_index_groups") else nowhere
    inside = Manual("inside", atoms, lambda mesh: {}, differ, equal)
    # What is still to be added up over automatic axes may be added up over manual ones first.
    sums = [("add", (i,)) for i in range(len(operands))] if name == "psum" and len(operands) == 1 else []
    return make.rule(operands, results, local=local, sends=sends, linear=sums, manual=inside)


def _dims(name: str, params: dict[str, Any], make: RuleMaker, call: Call) -> tuple[list[Dims], list[Dims]]:
    """The dimensions of operands and results: parallel but for those along which parts are joined or cut."""
    keys = ("split_axis", "concat_axis", "all_gather_dimension", "scatter_dimension")
    along = {params[key] for key in keys if key in params}
    if name == "ragged_all_to_all":
        rest = make.parallel(call.in_shapes[0][1:])
        rows, room = make.replicate(call.in_shapes[0][0]), make.replicate(call.in_shapes[1][0])
        numbers: list[Dims] = [[make.replicate(n) for n in shape] for shape in call.in_shapes[2:]]
        return [[rows, *rest], [room, *rest], *numbers], [[room, *rest]]
    if name not in ("all_gather", "reduce_scatter", "all_to_all"):
        arrays: list[Dims] = [make.parallel(shape) for shape in call.in_shapes]
        return arrays, arrays if arrays else [[]]
    (shape,), (result,) = call.in_shapes, call.out_shapes
    if len(shape) == len(result):
        free = [make.parallel((n,))[0] if d not in along else () for d, n in enumerate(shape)]
        return [_with(free, shape, make)], [_with(free, result, make)]
    (at,) = along
    shorter, longer = sorted((shape, result), key=len)
    own = make.parallel(shorter)
    more: Dims = [*own[:at], make.replicate(longer[at]), *own[at:]]
    return ([own], [more]) if name == "all_gather" else ([more], [own])


def _with(dims: Dims, shape: tuple[int, ...], make: RuleMaker) -> Dims:
    """The same dimensions, new ones where there are none."""
    return [own or make.replicate(n) for own, n in zip(dims, shape, strict=True)]
