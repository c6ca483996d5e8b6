"""Callbacks: functions that run on the host while the program runs.

Callbacks take whole arrays, so gshard gathers their operands. They run as often as JAX promises:

    pure_callback                 once on every device; all devices pass equal operands and get equal results
    io_callback                   once per call: the first device calls, and the others receive its results
    debug_callback, debug_print   once per call
    the last two, partitioned     once on every device with its own part, whose padding is zero
    the first two, sharding=      once per call, by the device that the sharding names

While one device calls, the others wait for its results. On CPU, XLA limits how long a collective waits.
``io_callback`` keeps the order of calls (``ordered=True``). JAX does not keep it for the debug callbacks on several
devices, and gshard raises an error.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards
from gshard.core.errors import PlanError
from gshard.core.rule import Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.language.traits import set_traits

# Callbacks for which the user may choose the device: ``sharding=jax.sharding.SingleDeviceSharding(device)``.
WITH_A_DEVICE = ("pure_callback", "io_callback")

# Primitives without a rule, unless the user registers one.
set_traits("ffi_call", "infeed", "outfeed", pure=False)


@rule("pure_callback", pure=False)
def pure_callback(call: Call) -> Rule:
    """Every device calls with whole arrays, or only the device that the user names.

    >>> print(pure_callback(Call("pure_callback", {}, ((3, 4),), ((3,),), ("f4",))))
    a b -> c; replicate a b c
    """
    if call.params.get("sharding") is not None:
        return with_effects(call)
    make = RuleMaker()
    return make.rule(*_whole_arrays(make, call))


ONCE = ("io_callback", "debug_callback", "debug_print")


@rule(*ONCE, pure=False)
def with_effects(call: Call) -> Rule:
    """The first device calls with whole arrays, or the device that the user names.

    With ``partitioned=True`` every device calls with its own part.

    >>> print(with_effects(Call("debug_print", {"partitioned": True}, ((3, 4),), (), ("f4",))))
    a b ->
    """
    if call.params.get("partitioned"):
        return _partitioned(call)
    make = RuleMaker()
    # debug_print has a parameter for the order; other callbacks have an ordered effect.
    ordered = call.params.get("ordered") or type(call.params.get("effect")).__name__.startswith("Ordered")
    loses_order = ordered and call.name != "io_callback"
    without_sharding = {"sharding": None} if "sharding" in call.params else {}

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        caller = _caller(call.params.get("sharding"), shards)
        if shards.mesh.size == 1:
            return shards.bind(*arrays, **without_sharding)
        if loses_order:
            raise PlanError(
                f"'{call.name}' with ordered=True runs on one device only, and the mesh has {shards.mesh.size}.",
                shards.equation.line,
                hint="Leave the order out, or use jax.experimental.io_callback(..., ordered=True), which keeps it.",
            )
        calls = lax.axis_index(shards.mesh.atoms) == caller
        outputs = shards.equation.outputs

        def zeros(*_: Any) -> list[Any]:
            return [jnp.zeros(v.shape, v.dtype) for v in outputs]

        results = lax.cond(calls, lambda *xs: shards.bind(*xs, **without_sharding), zeros, *arrays)
        return [shards.all_reduce(x, shards.mesh.atoms, "pick") for x in results]

    return make.rule(*_whole_arrays(make, call), local=local)


def _caller(sharding: Any, shards: Shards) -> int:
    """The position in the mesh of the device that calls: the device that a sharding names, or the first device."""
    if sharding is None:
        return 0
    devices = tuple(sharding.device_set)
    mesh_devices = shards.mesh.devices
    if len(devices) == 1 and mesh_devices is None:  # an abstract mesh: every caller sends the same bytes
        return 0
    if len(devices) != 1 or mesh_devices is None or devices[0] not in mesh_devices:
        raise PlanError(
            f"the sharding of '{shards.equation.name}' does not name one device of the mesh.",
            shards.equation.line,
            f"sharding={sharding}; mesh: {shards.mesh}",
            "Name the device that calls: jax.sharding.SingleDeviceSharding(device), or leave sharding= out.",
        )
    return mesh_devices.index(devices[0])


def _partitioned(call: Call) -> Rule:
    make = RuleMaker()

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        return shards.bind(*(shards.filled(x, i) for i, x in enumerate(arrays)), partitioned=False)

    return make.rule([make.parallel(shape) for shape in call.in_shapes], [], local=local)


def _whole_arrays(make: RuleMaker, call: Call) -> tuple[list[Any], list[Any]]:
    """New dimensions of operands and results that cannot be split."""
    operands = [[make.replicate(n) for n in shape] for shape in call.in_shapes]
    return operands, [[make.replicate(n) for n in shape] for shape in call.out_shapes]
