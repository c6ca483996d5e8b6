"""Compiled program: what the text of a compiled program, and the objects of JAX it came from, tell of it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import jax

from gshard.core.errors import ArgumentError, MeshError
from gshard.core.mesh import Atoms, Mesh
from gshard.device.memory import MemoryTotals
from gshard.naming.short_names import ShortName, short_names
from gshard.xla.buffers import HeldMemory, aliased_results, held_by
from gshard.xla.dataflow import PRODUCTS, Array, Dataflow
from gshard.xla.hlo_collectives import Sent, sent_by
from gshard.xla.hlo_parser import Instruction, Module, read_module
from gshard.xla.kernels import arrays_of
from gshard.xla_programs.read_shardings import ReadSharding, read_sharding

_MESH = re.compile(r"\bmesh\[((?:'[^']*'=\d+,?\s*)+)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledArgument:
    """One argument of a compiled program."""

    name: str  # its path, ``params['up']``; ``argument 3`` if the program does not tell
    short: ShortName  # what it is called in tables
    type: str  # of one device's part, ``f32[8,4]``
    local_bytes: int  # of this part;
    bytes: int | None  # and of the whole array; None if the program does not tell
    sharding: str  # how it is cut, as text; empty if the program does not tell
    # in how many parts each dimension is cut; empty if each device has the whole array, or if it is unknown
    parts: tuple[int, ...] = ()
    dims: tuple[Atoms, ...] | None = None  # the atoms of the mesh that cut each dimension; None if they are not known

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return self.bytes == self.local_bytes


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program that can be explained."""

    name: str  # of the function
    module: Module  # what was read
    mesh: Mesh  # the devices and the names of their axes
    arguments: tuple[CompiledArgument, ...]  # in order
    results: tuple[str, ...] = ()  # names of the results in order, as far as they are known
    platform: str = ""  # ``cpu``, ``gpu`` or ``tpu``; empty if that is not known
    memory: MemoryTotals | None = None  # the compiler's own figures, or None

    @functools.cached_property
    def flow(self) -> Dataflow:
        """Where its arrays come from, and what reads them."""
        return Dataflow(self.module)

    @functools.cached_property
    def sent(self) -> tuple[Sent, ...]:
        """Its collectives."""
        return sent_by(self.module)

    @functools.cached_property
    def held(self) -> HeldMemory:
        """What a device holds, as read from the schedule."""
        return held_by(self.module)

    @functools.cached_property
    def updates(self) -> Mapping[int, int]:
        """The results that take the memory of a donated argument, with its number."""
        return aliased_results(self.module)

    @functools.cached_property
    def weights(self) -> frozenset[int]:
        """The arguments that products and look-ups read."""
        return self._read_by(
            lambda made: (
                made.opcode in PRODUCTS or ("custom_call_target" in made.attributes and "dot" in made.attributes)
            )
        )

    @functools.cached_property
    def differentiated(self) -> frozenset[int]:
        """The arguments that a differentiated function reads: weights, biases and data, but no moments."""
        return self._read_by(lambda made: "jvp(" in made.op_name)

    def _read_by(self, reads: Callable[[Instruction], bool]) -> frozenset[int]:
        """The arguments that some instructions read."""
        return frozenset(
            number
            for name, computation in self.module.computations.items()
            for made in computation.instructions.values()
            if reads(made)
            for operand in made.operands
            for number in self.flow.arguments(Array(name, operand))
        )

    @property
    def instructions(self) -> int:
        """How many instructions it has, those of fusions included."""
        return sum(len(computation.instructions) for computation in self.module.computations.values())

    @property
    def totals(self) -> MemoryTotals:
        """What a device holds: by the compiler where it tells, else as read from the schedule."""
        return self.memory or self.held

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return self.totals.peak


def read_program(
    text: str,
    mesh: Mesh | None = None,
    *,
    whole: Sequence[tuple[int, str] | None] = (),
    cuts: Sequence[ReadSharding | None] = (),
    results: Sequence[str] = (),
    platform: str = "",
    memory: MemoryTotals | None = None,
    names: Mapping[str, str] | None = None,
) -> CompiledProgram:
    """Reads a compiled program."""
    if not text.lstrip().startswith("HloModule"):
        raise ArgumentError(
            "this is no compiled program.",
            got=f"text that begins with {text.lstrip()[:40]!r}",
            hint="Give what jax.jit(f).lower(...).compile().as_text() prints, or a file of --xla_dump_to whose name "
            "ends in after_optimizations.txt.",
        )
    module = read_module(text[text.index("HloModule") :])
    if "ENTRY" in text:
        _refuse_unfinished(module)
    if not module.entry:
        raise ArgumentError("this compiled program has no entry.", hint="The text may be cut off: give all of it.")
    mesh = mesh or _mesh_in(text) or Mesh.abstract(devices=module.devices)
    if mesh.size != module.devices:
        raise MeshError(
            f"the program runs on {module.devices} devices, and the mesh has {mesh.size}.",
            got=f"mesh: {mesh}",
            hint=f"Give a mesh of {module.devices} devices, such as --mesh {module.devices}.",
        )
    name = module.header.partition(",")[0].removeprefix("HloModule ").strip()
    program = CompiledProgram(
        name.removeprefix("jit_"), module, mesh, (), tuple(results), platform or _platform_of(text), memory
    )
    return dataclasses.replace(program, arguments=_arguments(program, whole, cuts, names or {}))


def memory_figures(compiled: jax.stages.Compiled) -> MemoryTotals | None:
    """What the compiler reports of the memory of a program; None if the backend reports nothing."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    return MemoryTotals(
        found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes, found.temp_size_in_bytes
    )


def _refuse_unfinished(module: Module) -> None:
    """Refuses the text of an earlier stage, whose collectives, kernels and memory are not those that run."""
    if "is_scheduled=true" not in module.header:
        raise ArgumentError(
            "this is no compiled program: XLA had not finished partitioning and optimising it.",
            got=f"{module.header[:60]}..., without is_scheduled=true",
            hint="Of the files that --xla_dump_to writes for a module, give the one whose name ends in "
            "after_optimizations.txt, or give what jax.jit(f).lower(...).compile().as_text() returns.",
        )


def _mesh_in(text: str) -> Mesh | None:
    """The mesh that shardings and groups in the text name."""
    found = _MESH.search(text)
    if found is None:
        return None
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
    return Mesh.abstract(**({name: size for name, size in sizes.items() if size > 1} or sizes))


def _platform_of(text: str) -> str:
    if '"estimated_cycles"' in text or ":T(8,128)" in text:
        return "tpu"
    return "gpu" if "gpu_backend_config" in text or "native_emitter_backend_config" in text else ""


def _arguments(
    program: CompiledProgram,
    whole: Sequence[tuple[int, str] | None],
    cuts: Sequence[ReadSharding | None],
    called: Mapping[str, str],
) -> tuple[CompiledArgument, ...]:
    entry = program.module.computations[program.module.entry]
    found = sorted((i for i in entry.instructions.values() if i.opcode == "parameter"), key=lambda i: i.number)
    names = [called.get(i.op_name, i.op_name) or f"argument {i.number}" for i in found]
    names = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]
    types = [arrays_of(i.type) for i in found]
    weights = [names[i] for i in program.weights if i < len(names)]
    short = short_names({name: str(type) for name, type in zip(names, types, strict=True)}, weights)
    rows = []
    for i, (made, name, arrays) in enumerate(zip(found, names, types, strict=True)):
        local = sum(a.bytes for a in arrays)
        known = whole[i] if i < len(whole) else None
        cut = (cuts[i] if i < len(cuts) else None) or read_sharding(made.attributes, program.mesh)
        size, sharding = known or ((None, "") if cut is None else (local * cut.count, cut.text))
        kind = " ".join(map(str, arrays))
        parts, dims = ((), None) if cut is None else (cut.parts, cut.dims)
        rows.append(CompiledArgument(name, short[name], kind, local, size, sharding, parts, dims))
    return tuple(rows)
