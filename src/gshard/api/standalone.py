"""Standalone: a compiled program that runs without gshard, so that it can be saved and loaded.

``jax.experimental.serialize_executable`` saves what XLA compiled. It is loaded as a ``jax.stages.Compiled``, which
gives its arguments to XLA as they are. So what ``api.lowered.Compiled`` does before and after a call must be a part of
the program: arrays that the function closed over become constants, and all values have one order of devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gshard.api.static_leaves import has_fixed
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import names_devices
from gshard.emit.compile import compiled_with_constants


def standalone(lowered: Any) -> Any:
    """The ``jax.stages.Compiled`` of a program's flat arguments and flat results."""
    name = lowered.program.name
    outputs = zip(lowered.spmd.out_shardings, lowered.program.block.outputs, strict=True)
    if lowered.padded or not all(s.is_even(lowered.mesh, v.shape) for s, v in outputs):
        padded = 'takes or returns arrays in padded parts (uneven="keep")'
        raise _refused(name, padded, 'Leave out uneven="keep" for it.')
    if has_fixed(lowered.in_tree) or has_fixed(lowered.out_tree):
        no_array = "has arguments or results that are no arrays"
        raise _refused(name, no_array, "Give the arrays alone (equinox.partition), and combine them inside.")
    if names_devices(lowered.spmd.jaxpr):
        raise _refused(name, "calls back to Python", "Leave out callbacks (jax.debug.print, pure_callback) in it.")
    if lowered.spmd.in_orders or lowered.spmd.out_orders:
        return standalone(dataclasses.replace(lowered, target=dataclasses.replace(lowered.target, reorders=False)))
    executable, target = lowered.executable, lowered.target
    if not executable.captured:
        return executable.compiled
    options = dict(target.compiler_options) or None
    return compiled_with_constants(
        executable, lowered.donated, keep_unused=target.keep_unused, compiler_options=options
    )


def _refused(name: str, what: str, hint: str) -> ArgumentError:
    return ArgumentError(f"{name} {what}, which cannot be saved with a compiled program.", user_line(), hint=hint)
