"""Memory kinds of the arguments and results of a call, as in ``jax.jit``.

An argument comes in the memory in which it is, or in the one that ``in_shardings`` names: an array that is in another
is moved there before each call. A result leaves in the memory of its type, or in the one that ``out_shardings`` names.
A ``PartitionSpec`` or an axis name there is a sharding in the default memory of the devices.
"""

from __future__ import annotations

from typing import Any

import jax

from gshard.api.signature import Leaf, Signature
from gshard.api.specs import memories_of, spread
from gshard.api.target import Options
from gshard.core.memory_kinds import is_on_host, kind_in_space, memory_of
from gshard.core.program import Program


def memories(program: Program, signature: Signature, options: Options) -> dict[str, Any]:
    """The fields of a ``Program`` that say in which memory kinds its inputs come and its results leave.

    Args:
        program: the traced function.
        signature: of the call.
        options: what ``gshard.jit`` was asked for.
    """
    asked: list[str | None] = [None] * len(signature.every)
    if options.in_shardings is not None:
        asked[: len(signature.leaves)] = memories_of(options.in_shardings, signature.arguments())
    come = [kind or _kind_of(leaf) for kind, leaf in zip(asked, signature.every, strict=True)]
    leave = [program.output_memory(i) for i in range(len(program.block.outputs))]
    if options.out_shardings is not None:
        results = jax.tree.unflatten(program.out_tree, range(len(leave)))
        if program.references:  # their final values are further results
            results, _ = results
        said = [memory_of(spec) for _, spec, _ in spread("out_shardings", options.out_shardings, results)]
        leave[: len(said)] = [kind or typed for kind, typed in zip(said, leave, strict=False)]
    held = [program.input_memory(i) for i in range(len(program.captured))]
    return {"input_memories": (*held, *come), "output_memories": tuple(leave)}


def _kind_of(leaf: Leaf) -> str:
    """The memory kind in which an argument is; of one that is in none yet, that of its type."""
    return (None if leaf.sharding is None else memory_of(leaf.sharding)) or kind_in_space(is_on_host(leaf.aval))
