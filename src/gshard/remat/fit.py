"""Compiles a program within a memory limit by the compiler's own figures.

``rematerialise`` uses modelled memory. If the compiled program takes more, gshard lowers the limit of the model and
compiles again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gshard.core.planning_tables import with_tables
from gshard.core.program import format_bytes
from gshard.core.spmd import SpmdProgram
from gshard.device.machine import Machine
from gshard.emit.compile import Executable, compile_spmd
from gshard.remat.rematerialise import MemoryLimitError, rematerialise

_ATTEMPTS = 6


@with_tables
def compiled_within(
    program: SpmdProgram,
    spmd: SpmdProgram,
    limit: int,
    machine: Machine,
    donated: frozenset[int],
    compiled: Callable[..., Executable] = compile_spmd,
) -> Executable:
    """Compiles a program that recomputes as many values as the limit requires."""
    target, planned = limit, ""
    for _ in range(_ATTEMPTS):
        executable = compiled(program, donated)
        try:
            peak = peak_of(executable.compiled)
            planned = f"the compiler needs {format_bytes(peak)}"
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            peak, planned = limit + limit // 10, str(error).splitlines()[0]
        if peak <= limit:
            return executable
        expected = program.recomputed.after if program.recomputed is not None else target
        target = min(target, expected) - (peak - limit)
        try:
            program = rematerialise(spmd, target, machine, donated)
        except MemoryLimitError:
            break  # the model cannot go lower
    failed = MemoryLimitError(
        f"the compiled program does not fit in memory_limit ({format_bytes(limit)}), whatever is recomputed.",
        None,
        planned,
        "Split more (marks, a larger mesh), use a smaller batch, donate arguments, or allow more memory.",
    )
    failed.needed = peak
    raise failed


def peak_of(compiled: Any) -> int:
    """Bytes that a device holds, by the compiler: arguments, results outside of their memory, temporaries.

    The TPU compiler also counts the memory of results and of donated arguments as temporaries, if it is used until the
    result is computed. Its own figure for the peak counts each buffer once. (The figures of other compilers for the
    peak omit temporaries.)
    """
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    reported_peak = getattr(memory, "peak_memory_in_bytes", 0) if _is_for_tpus(compiled) else 0
    return int(reported_peak or total - memory.alias_size_in_bytes)


def _is_for_tpus(compiled: Any) -> bool:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return any(device.platform == "tpu" for sharding in shardings[:1] for device in sharding.device_set)
