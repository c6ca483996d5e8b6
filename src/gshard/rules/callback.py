"""Callbacks: functions that run on the host while the program runs.

They are written for the whole arrays, so their operands are gathered. How often they run is what JAX promises of each:

    pure_callback                 once on every device; all get the same and give the same
    io_callback                   exactly once a call: the first device calls, results are handed to the others
    debug_callback, debug_print   exactly once a call
    the last two, partitioned     once on every device, with its own part, padding filled with zeros
    the first two, sharding=      exactly once a call, by the device that the sharding names

While one device calls, the others wait for what it returns; on CPU no longer than XLA lets a collective wait.
Order (``ordered=True``) is kept by ``io_callback``; JAX does not keep it for the other two on several devices, and that
is an error here.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, mask
from gshard.comm.steps import ALL_REDUCE
from gshard.core.context import NO_CONTEXT
from gshard.core.errors import PlanError
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Mesh
from gshard.core.program import itemsize
from gshard.core.rule import Rule, RuleMaker
from gshard.core.split import Split
from gshard.language.registry import Call, rule
from gshard.language.traits import set_traits

# Callbacks whose device the user may choose: ``sharding=jax.sharding.SingleDeviceSharding(device)``.
WITH_A_DEVICE = ("pure_callback", "io_callback")

# They have no rule, or the user's.
set_traits("ffi_call", "infeed", "outfeed", pure=False)


@rule("pure_callback", pure=False)
def pure_callback(call: Call) -> Rule:
    """Every device calls, with whole arrays; or the one that the user names.

    >>> print(pure_callback(Call("pure_callback", {}, ((3, 4),), ((3,),), ("f4",))))
    a b -> c; replicate a b c
    """
    if call.params.get("sharding") is not None:
        return with_effects(call)
    make = RuleMaker()
    return make.rule(*_whole(make, call))


ONCE = ("io_callback", "debug_callback", "debug_print")


@rule(*ONCE, pure=False)
def with_effects(call: Call) -> Rule:
    """The first device calls, with whole arrays, or the one that the user names; or every device with its part, if the
    user says ``partitioned``.

    >>> print(with_effects(Call("debug_print", {"partitioned": True}, ((3, 4),), (), ("f4",))))
    a b ->
    """
    if call.params.get("partitioned"):
        return _by_parts(call)
    make = RuleMaker()
    # The one that prints says so, the other one's effect does.
    ordered = call.params.get("ordered") or type(call.params.get("effect")).__name__.startswith("Ordered")
    unkept = ordered and call.name != "io_callback"

    anywhere = {"sharding": None} if "sharding" in call.params else {}

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        caller = _caller(call.params.get("sharding"), shards)
        if shards.mesh.size == 1:
            return shards.bind(*arrays, **anywhere)
        if unkept:
            raise PlanError(
                f"'{call.name}' with ordered=True runs on one device only, and the mesh has {shards.mesh.size}.",
                shards.equation.line,
                hint="Leave the order out, or use jax.experimental.io_callback(..., ordered=True), which keeps it.",
            )
        first = lax.axis_index(shards.mesh.atoms) == caller
        outputs = shards.equation.outputs

        def nothing(*_: Any) -> list[Any]:
            return [jnp.zeros(v.shape, v.dtype) for v in outputs]

        results = lax.cond(first, lambda *xs: shards.bind(*xs, **anywhere), nothing, *arrays)
        return [_from_first(shards, x) for x in results]

    def sends(mesh: Mesh, split: Split) -> int:
        sizes = (math.prod(v.shape) * itemsize(v.dtype) for v in call.params.get("result_avals", ()))
        return sum(_sent(n, mesh) for n in sizes)

    return make.rule(*_whole(make, call), local=local, sends=sends)


@rule("inspect_sharding", pure=False)
def inspect_sharding(call: Call) -> Rule:
    """An inspection of a sharding takes the array in any sharding; no program runs it (``tracing.looks``).

    >>> print(inspect_sharding(Call("inspect_sharding", {}, ((3, 4),), (), ("f4",))))
    a b ->
    """
    make = RuleMaker()
    return make.rule([make.parallel(shape) for shape in call.in_shapes], [], local=lambda shards, x: [], flops=0)


def _caller(sharding: Any, shards: Shards) -> int:
    """The number of the device that calls: of the one that a sharding names, else of the first.

    Raises:
        PlanError: it does not name one device of the mesh.
    """
    if sharding is None:
        return 0
    devices, own = tuple(sharding.device_set), shards.mesh.devices
    if len(devices) == 1 and own is None:  # a mesh to plan for: what is sent is the same for all
        return 0
    if len(devices) != 1 or own is None or devices[0] not in own:
        raise PlanError(
            f"the sharding of '{shards.equation.name}' does not name one device of the mesh.",
            shards.equation.line,
            f"sharding={sharding}; mesh: {shards.mesh}",
            "Name the device that calls: jax.sharding.SingleDeviceSharding(device), or leave sharding= out.",
        )
    return own.index(devices[0])


def _by_parts(call: Call) -> Rule:
    make = RuleMaker()
    operands = [make.parallel(shape) for shape in call.in_shapes]

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        shown = []
        for x, dims in zip(arrays, operands, strict=True):
            for d, (f,) in enumerate(dims):
                size, atoms = shards.rule.factors[f].size, shards.atoms(f)
                x = mask(x, d, size, atoms, 0) if atoms and size % shards.mesh.count(atoms) else x
            shown.append(x)
        return shards.bind(*shown, partitioned=False)

    return make.rule(operands, [], local=local)


def _whole(make: RuleMaker, call: Call) -> tuple[list[Any], list[Any]]:
    operands = [[make.replicate(n) for n in shape] for shape in call.in_shapes]
    return operands, [[make.replicate(n) for n in shape] for shape in call.out_shapes]


@in_context(NO_CONTEXT)
def _from_first(shards: Shards, x: Any) -> Any:
    """The first device's array on every device, bit for bit: the others add zeros to it."""
    if not x.size:
        return x
    atoms = shards.mesh.atoms
    if shards.note is not None:
        shards.note(ALL_REDUCE, atoms, _sent(x.size * x.dtype.itemsize, shards.mesh), x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        both = lax.psum(_bits(jnp.stack([x.real, x.imag])), atoms)
        real, imaginary = lax.bitcast_convert_type(both, x.real.dtype)
        return lax.complex(real, imaginary)
    whole = lax.psum(_bits(x), atoms)
    return whole.astype(x.dtype) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(whole, x.dtype)


def _bits(x: Any) -> Any:
    """Numbers as integers of the same width: adding zero to minus zero would lose its sign."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _sent(size: int, mesh: Mesh) -> int:
    return 2 * size * (mesh.size - 1) // mesh.size
