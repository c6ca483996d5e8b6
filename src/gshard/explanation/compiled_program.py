"""Compiled program: what the text of a compiled program, and the objects beside it, tell of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.errors import ArgumentError, MeshError
from gshard.core.jax_adapter import Frame
from gshard.core.mesh import Atoms, Mesh
from gshard.device.memory import MemoryTotals
from gshard.explanation.places import Place, helpers_of, place_in
from gshard.explanation.rows import ArrayRow
from gshard.naming.argument_names import argument_names
from gshard.xla.as_on_accelerators import as_on_accelerators
from gshard.xla.dataflow import PRODUCTS, Array, Dataflow
from gshard.xla.hlo_collectives import CompiledCollective, collectives_of, numbers_in
from gshard.xla.hlo_parser import Instruction, Module, arrays_of, read_module
from gshard.xla.kernels import HeldMemory, aliased_results, held_by

# Read shardings: along which axes of the mesh the sharding in the text of a program cuts an array.

WHOLE = "whole on each device"
_TILES = re.compile(
    r"\bsharding=\{devices=\[([\d,]+)\](?:<=(\[[\d,]+\](?:T\([\d,]+\))?)|([\d,]+))?([^{}]*(?:\{[^}]*\})?)"
)
_NAMED = re.compile(r"\bsharding=\{@?mesh\[[^\]]*\][^\[]*\[(.*?)\]\s*(?:,[^}]*)?\}")


@dataclasses.dataclass(frozen=True, slots=True)
class ReadSharding:
    """How an array is cut."""

    parts: tuple[int, ...]  # in how many parts each dimension is cut; none where all of the array is on each device
    dims: tuple[Atoms, ...] | None  # the atoms of the mesh that cut each dimension; None if the parts lie along no axes
    text: str  # ``P(data)``; the parts if no axes are known

    @property
    def count(self) -> int:
        """In how many parts the array is cut."""
        return math.prod(self.parts)


def read_sharding(attributes: str, mesh: Mesh) -> ReadSharding | None:
    """The sharding in the attributes of an instruction; None if it has none, or one of another kind.

    >>> mesh = Mesh.abstract(data=2, model=4)
    >>> read_sharding("sharding={devices=[4,2]<=[2,4]T(1,0)}", mesh).text
    'P(model, data)'
    >>> read_sharding("sharding={devices=[1,4,2]<=[8] last_tile_dim_replicate}", mesh).dims
    ((), ('data', 'model.0'))
    >>> read_sharding("sharding={replicated}", mesh).text
    'whole on each device'
    """
    if named := _NAMED.search(attributes):
        return _named(named[0], named[1], mesh)
    if tiles := _TILES.search(attributes):
        return _tiled(tiles, mesh)
    return ReadSharding((), (), WHOLE) if "sharding={replicated}" in attributes else None


def _named(text: str, entries: str, mesh: Mesh) -> ReadSharding:
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", text)}
    # An axis may be cut in parts: 'a':(1)2.
    cut = [re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", entry) for entry in re.findall(r"\{([^{}]*)\}", entries)]
    parts = tuple(math.prod(int(part or sizes.get(axis, 1)) for axis, part in axes) for axes in cut)
    axes_of = [[axis for axis, _ in axes] for axes in cut]
    # The user may call the axes otherwise.
    is_known = all(dict(mesh.axes).get(axis) == sizes.get(axis) for axes in axes_of for axis in axes)
    has_names = ":(" not in entries
    dims = None
    if is_known and has_names:
        dims = tuple(tuple(a for axis in axes for a in mesh.atoms_of[axis]) for axes in axes_of)
    return ReadSharding(parts, dims, _text(parts, axes_of if has_names else None))


def _text(parts: Sequence[int], axes_of: Sequence[Sequence[str]] | None) -> str:
    """The axes of each dimension as JAX writes them, without the last dimensions that are whole; else the parts."""
    if math.prod(parts) == 1:
        return WHOLE
    if axes_of is None:
        return f"in {' x '.join(map(str, parts))} parts"
    words = [axes[0] if len(axes) == 1 else f"({', '.join(axes)})" if axes else "None" for axes in axes_of]
    while words[-1] == "None":
        words.pop()
    return f"P({', '.join(words)})"


def _tiled(found: re.Match[str], mesh: Mesh) -> ReadSharding:
    sizes, order, listed, more = found.groups()
    shape = tuple(map(int, sizes.split(",")))
    beside = re.search(r"last_tile_dims=\{([^}]*)\}", more)  # dimensions that cut nothing
    rank = len(shape) - (len(beside[1].split(",")) if beside else "last_tile_dim_replicate" in more)
    parts = shape[:rank]
    devices = numbers_in(order or listed or f"[{sizes}]")
    dims = None
    if devices.size == math.prod(shape) == mesh.size:
        part_of = np.empty((rank, mesh.size), int)  # of each device, the number of its part along each dimension
        part_of[:, devices] = np.indices(shape)[:rank].reshape(rank, -1)
        along = [_atoms(part, count, mesh) for part, count in zip(part_of, parts, strict=True)]
        dims = None if None in along else tuple(atoms for atoms in along if atoms is not None)
    axes_of = None if dims is None else [mesh.format_atoms(atoms).split(",") if atoms else [] for atoms in dims]
    return ReadSharding(parts, dims, _text(parts, axes_of))


def _atoms(part: np.ndarray, count: int, mesh: Mesh) -> Atoms | None:
    """The atoms that number the parts of a dimension, the slowest first; None if none do."""
    grid = part.reshape(tuple(mesh.atom_sizes.values()))
    step = {atom: int(np.diff(grid, axis=i).flat[0]) for i, atom in enumerate(mesh.atom_sizes)}
    atoms = tuple(sorted((atom for atom, by in step.items() if by), key=lambda atom: -step[atom]))
    digits = np.indices(grid.shape)
    told = sum(by * digits[i] for i, by in enumerate(step.values()))
    is_numbered = mesh.count(atoms) == count == len(np.unique(grid)) and np.array_equal(told, grid)
    return atoms if is_numbered else None


_MESH = re.compile(r"\bmesh\[((?:'[^']*'=\d+,?\s*)+)\]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledArgument(ArrayRow):
    """One argument of a compiled program."""

    type: str  # of one device's part, ``f32[8,4]``
    cut: ReadSharding | None  # how it is cut; None if the program does not tell


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
    def sent(self) -> tuple[CompiledCollective, ...]:
        """Its collectives; of a program for CPU as XLA for accelerators sends them."""
        return self.sent_here if self.platform in ("gpu", "tpu") else as_on_accelerators(self.flow, self.sent_here)

    @functools.cached_property
    def sent_here(self) -> tuple[CompiledCollective, ...]:
        """Its collectives as they are in it."""
        return collectives_of(self.module)

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
        return self._read_by(_is_product)

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

    def place_of(self, made: Instruction) -> Place | None:
        """The user's line of an instruction; None if it does not tell."""
        frames = self.module.frames_of(made)
        return self._places.get(frames) or place_in(frames, ())

    @functools.cached_property
    def _places(self) -> Mapping[tuple[Frame, ...], Place | None]:
        """The places of operations, by their frames."""
        inside = (computation.instructions.values() for computation in self.module.computations.values())
        products = filter(_is_product, itertools.chain(*inside))
        helpers = helpers_of(map(self.module.frames_of, products), self.module.frames.values())
        return {frames: place_in(frames, helpers) for frames in self.module.frames.values()}

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


def _is_product(made: Instruction) -> bool:
    return made.opcode in PRODUCTS or ("custom_call_target" in made.attributes and "dot" in made.attributes)


def read_program(
    text: str,
    mesh: Mesh | None = None,
    *,
    results: Sequence[str] = (),
    platform: str = "",
    memory: MemoryTotals | None = None,
    names: Mapping[str, str] | None = None,
    cuts: Sequence[str] = (),
) -> CompiledProgram:
    """Reads a compiled program; ``cuts`` are the shardings of its parameters if the text does not have them."""
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
    return dataclasses.replace(program, arguments=_arguments(program, names or {}, cuts))


def memory_figures(compiled: jax.stages.Compiled) -> MemoryTotals | None:
    """What the compiler reports of the memory of a program; None if the backend reports nothing."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    return MemoryTotals(
        found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes, found.temp_size_in_bytes
    )


def parameter_shardings(compiled: jax.stages.Compiled) -> list[str]:
    """The shardings of a program's parameters as XLA prints them; XLA of JAX 0.12 leaves them out of the text."""
    executable = compiled.runtime_executable()
    found: Sequence[Any] = getattr(executable, "get_parameter_shardings", list)() or []
    # The module of what an executable returns has what prints it.
    return [f"sharding={sys.modules[type(s).__module__].HloSharding.from_proto(s)!r}" for s in found]


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
    program: CompiledProgram, called: Mapping[str, str], cuts: Sequence[str]
) -> tuple[CompiledArgument, ...]:
    entry = program.module.computations[program.module.entry]
    found = sorted((i for i in entry.instructions.values() if i.opcode == "parameter"), key=lambda i: i.number)
    names = [called.get(i.op_name, i.op_name) or f"argument {i.number}" for i in found]
    names = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]
    types = [arrays_of(i.type) for i in found]
    short = argument_names({name: str(type) for name, type in zip(names, types, strict=True)})
    rows = []
    beside = cuts if len(cuts) == len(found) else [""] * len(found)
    for made, name, arrays, more in zip(found, names, types, beside, strict=True):
        local, kind = sum(a.bytes for a in arrays), " ".join(map(str, arrays))
        attributes = f"{made.attributes} {more}"
        cut = ReadSharding((), (), "") if program.mesh.size == 1 else read_sharding(attributes, program.mesh)
        size, text = (None, "") if cut is None else (local * cut.count, cut.text)
        pieces = 1 if size is None or not local else round(size / local)
        note = "the program does not tell" if size is None else f"one of {pieces} parts" if pieces > 1 else "all of it"
        row = CompiledArgument(
            name=name, short=short[name], sharding=f"{kind} {text}".strip(), bytes=size, local_bytes=local, note=note,
            type=kind, cut=cut,
        )  # fmt: skip
        rows.append(row)
    return tuple(rows)
