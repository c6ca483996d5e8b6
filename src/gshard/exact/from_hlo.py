"""From HLO: what XLA's SPMD partitioner made of a lowered function, as a JAX program.

``partitioned_hlo`` compiles a lowered function, and reads the module as it is right after partitioning: the program of
one device, with every collective, before XLA fuses and reorders. ``jaxpr_of`` turns it into a jaxpr of ``jax.lax``
primitives with the arguments and results of the function: one ``shard_map`` over the mesh of the function. Equations
have the source lines of their instructions.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import TraceError
from gshard.core.jax_adapter import Frame, impl_of_keys, no_mesh_set, shapes_of, user_line
from gshard.core.jax_adapter_context import wide_enough_for
from gshard.core.jax_adapter_dispatch import kept_arguments
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tabulated, with_tables
from gshard.exact.hlo_instructions import (
    COPIES,
    DTYPES,
    INSTRUCTIONS,
    REDUCED,
    SCATTERED,
    constant,
    is_neutral,
    kinds_of,
    shape_of,
    sort_keys,
    vectors_last,
    window_of,
)
from gshard.simulator.simulate import device_groups
from gshard.xla.hlo_collectives import groups_of, pairs_of
from gshard.xla.hlo_parser import BRANCHES, Instruction, Module, arrays_of, read_module

_PASS = "spmd-partitioning"
_NEVER = 1e9  # seconds: no compilation takes as long


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A function as XLA's partitioner leaves it.

    Attributes:
        module: the program of one device.
        mesh: the devices in the order of their partition numbers.
        arguments: shapes and dtypes of the whole flat arguments;
        kept: the numbers of those that the program reads;
        in_specs: and how these are split over the atoms of the mesh.
        results: shapes and dtypes of the whole flat results;
        out_specs: and how they are split.
    """

    module: Module
    mesh: Mesh
    arguments: tuple[Any, ...]
    kept: tuple[int, ...]
    in_specs: tuple[PartitionSpec, ...]
    results: tuple[Any, ...]
    out_specs: tuple[PartitionSpec, ...]


def partitioned_hlo(lowered: jax.stages.Lowered) -> Partitioned:
    """Compiles a lowered function, and reads what XLA's partitioner made of it.

    Neither the environment nor files that remain are used, and JAX's persistent compilation cache neither answers nor
    keeps this compilation.

        >>> import jax
        >>> from gshard.exact.from_hlo import partitioned_hlo
        >>> partitioned_hlo(jax.jit(lambda x: x + 1).lower(1.0)).module.devices
        1

    Args:
        lowered: what ``jax.jit(f).lower(*args)`` gives.

    Raises:
        TraceError: XLA wrote no module, or an argument or a result is split in a way that no mesh axes describe.
    """
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": _PASS}
        options["xla_dump_large_constants"] = True  # this also changes the key in the persistent cache
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _NEVER)
        try:
            compiled = lowered.compile(compiler_options=options)
        finally:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        # XLA does not partition a program of one device.
        texts = [p.read_text() for n in (f"after_{_PASS}", "before_optim") for p in Path(folder).glob(f"*.{n}*.txt")]
    module = read_module(texts[0]) if texts else None
    if module is None or (module.devices > 1 and len(texts) == 1):
        raise TraceError(
            "XLA did not write the program that its partitioner made.",
            hint="If JAX's persistent compilation cache has a program that was compiled with xla_dump_large_constants, "
            "take it out.",
        )
    arguments, kept = tuple(jax.tree.leaves(lowered.in_avals)), tuple(sorted(kept_arguments(compiled)))
    results = tuple(jax.tree.leaves(lowered.out_info))
    takes: Any = lowered.in_tree
    gives: Any = lowered.out_tree
    given, made = takes.flatten_up_to(compiled.input_shardings), gives.flatten_up_to(compiled.output_shardings)
    given = [given[i] for i in kept]
    meshes = (s.mesh for s in (*given, *made) if isinstance(s, NamedSharding) and s.mesh.size == module.devices)
    mesh = Mesh.of(next(meshes, {"devices": module.devices}))
    in_specs = tuple(_spec(s, arguments[i].shape, mesh) for i, s in zip(kept, given, strict=True))
    out_specs = tuple(_spec(s, x.shape, mesh) for s, x in zip(made, results, strict=True))
    return Partitioned(module, mesh, arguments, kept, in_specs, results, out_specs)


def _spec(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """A sharding as atoms of a mesh, from the block that each device has of each dimension."""
    if mesh.size == 1:
        return PartitionSpec()
    slices, sizes = sharding.devices_indices_map(shape), tuple(mesh.atom_sizes.values())
    position = dict(zip(mesh.atoms, np.indices(sizes), strict=True))  # of each device along each atom
    entries: list[Any] = []
    for d, size in enumerate(shape):
        starts = np.array([slices[device][d].start or 0 if device in slices else -1 for device in mesh.devices or ()])
        blocks = np.unique(starts, return_inverse=True)[1].reshape(sizes)
        # How far one step along an atom goes orders the atoms, major to minor.
        steps = {atom: int(blocks[(sum(position.values()) == 1) & (position[atom] == 1)][0]) for atom in position}
        along = tuple(sorted((a for a in steps if steps[a]), key=lambda a: -steps[a]))
        found = np.zeros(sizes, int)
        for atom in along:
            found = found * mesh.atom_sizes[atom] + position[atom]
        if (found != blocks).any() or size % mesh.count(along) or (starts < 0).any():
            raise TraceError(
                "an array is split in a way that axes of its mesh do not describe.", got=f"{shape}: {sharding}"
            )
        entries.append(along or None)
    return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class Translated:
    """A partitioned program as a jaxpr."""

    jaxpr: Any  # closed; from the whole flat arguments of the function to its whole flat results

    def line(self, equation: Any) -> str:
        """The user's ``file:line (function)`` of an equation of the jaxpr, or of one inside."""
        return user_line(equation.source_info)


@with_tables
def jaxpr_of(program: Partitioned) -> Translated:
    """Translates a partitioned program.

    Raises:
        TraceError: an instruction has no counterpart in JAX.
    """
    reader = _Reader(program.module, program.mesh)

    def local(*arrays: Any) -> tuple[Any, ...]:
        found = reader.run(program.module.entry, arrays)
        return found if isinstance(found, tuple) else (found,)

    def whole(*arrays: Any) -> tuple[Any, ...]:
        read = [_data(arrays[i]) for i in program.kept]
        run = local
        if program.mesh.size > 1:
            run = jax.shard_map(
                local, mesh=program.mesh.abstract_jax_mesh, in_specs=program.in_specs, out_specs=program.out_specs,
                check_vma=False,
            )  # fmt: skip
        return tuple(_typed(x, like) for x, like in zip(run(*read), program.results, strict=True))

    types_used = (a.dtype for c in program.module.computations.values() for i in c.instructions.values()
                  for a in arrays_of(i.type))  # fmt: skip
    with no_mesh_set(), wide_enough_for(DTYPES[t] for t in {*types_used} if t in DTYPES):
        return Translated(jax.make_jaxpr(whole)(*shapes_of(program.arguments)))


def _data(x: Any) -> Any:
    """The numbers of random keys; other arrays as they are."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _typed(x: Any, like: Any) -> Any:
    """Numbers as random keys, where the result has keys."""
    is_key = jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(x, impl=impl_of_keys(like)) if is_key else x


def _run(call: Callable[[], Any]) -> Any:
    return call()


@tabulated(4096)
def _frame(file: str, line: int, function: str) -> Callable[[Callable[[], Any]], Any]:
    """A function that calls its argument in a frame of this file, line and function."""
    name = function or "<module>"
    code = _run.__code__.replace(co_filename=file, co_firstlineno=line - 1, co_name=name, co_qualname=name)
    return types.FunctionType(code, {})


class _Reader:
    """Runs the computations of a module on JAX arrays, as one device of a mesh does."""

    def __init__(self, module: Module, mesh: Mesh):
        self.module, self.mesh = module, mesh

    def run(self, name: str, arguments: Sequence[Any]) -> Any:
        """The result of a computation: an array, or a tuple of results."""
        computation = self.module.computations[name]
        values: dict[str, Any] = {}
        frames: dict[str, tuple[Frame, ...]] = {}
        for name, made in computation.instructions.items():
            # What XLA adds without a line belongs to what it reads.
            inherited = (frames[o] for o in made.operands if frames.get(o))
            frames[name] = self.module.frames_of(made) or next(inherited, ())
            if made.opcode in ("parameter", "constant"):
                values[name] = arguments[made.number] if made.opcode == "parameter" else constant(made)
                continue
            call: Callable[[], Any] = functools.partial(self._checked, made, [values[o] for o in made.operands])
            for frame in frames[name]:  # the first is the innermost
                call = functools.partial(_frame(*frame), call)
            values[name] = call()
        return values[computation.root]

    def _checked(self, made: Instruction, operands: Sequence[Any]) -> Any:
        run = INSTRUCTIONS.get(made.opcode) or getattr(self, f"_{made.opcode.replace('-', '_')}", None)
        try:
            if run is None:
                raise NotImplementedError
            found = run(made, *operands)
            if [(np.shape(x), x.dtype) for x in jax.tree.leaves(found)] != kinds_of(made):
                raise TypeError(f"the translation has the type {jax.tree.map(jax.typeof, found)}")
        except TraceError:
            raise
        except Exception as error:
            target = made.text("custom_call_target")
            raise TraceError(
                f"the {f'custom call {target!r}' if target else f'HLO instruction {made.opcode!r}'} has no translation "
                f"to JAX{str(error) and f': {error}'}.",
                self.module.line_of(made) or None,
                f"%{made.name} = {made.type} {made.opcode}({made.literal}){made.attributes}"[:300],
            ) from error
        return found

    def _operation(self, name: str) -> str:
        """The opcode of a computation that is one operation on its two parameters, else empty."""
        computation = self.module.computations[name]
        root = computation.behind(computation.root, COPIES)
        assert root is not None
        made = [computation.instructions[o] for o in root.operands]
        numbers = [m.number for m in made if m.opcode == "parameter"]
        return root.opcode if numbers == [0, 1] or (numbers == [1, 0] and root.opcode in REDUCED) else ""

    def _combine(self, name: str) -> Callable[[Any, Any], Any]:
        """A computation that combines two tuples of numbers."""

        def combine(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
            found = self.run(name, [*a, *b])
            return found if isinstance(found, tuple) else (found,)

        return combine

    def _reduce(self, made: Instruction, *x: Any) -> Any:
        (name,), axes, n = made.called("to_apply"), made.numbers("dimensions"), len(x) // 2
        operation = self._operation(name) if n == 1 else ""
        if operation not in REDUCED:
            found = lax.reduce(x[:n], x[n:], self._combine(name), axes)
            return tuple(found) if made.type.startswith("(") else found[0]
        reduction, combine = REDUCED[operation]
        reduced = reduction(x[0], axes)
        return reduced if is_neutral(operation, x[1]) else combine(reduced, lax.full_like(reduced, x[1]))

    def _reduce_window(self, made: Instruction, *x: Any) -> Any:
        (name,), (window, _), n = made.called("to_apply"), window_of(made), len(x) // 2
        operation = self._operation(name) if n == 1 else ""
        if operation in REDUCED:
            return lax.reduce_window(x[0], x[1], REDUCED[operation][1], **window)
        found = lax.reduce_window(x[:n], x[n:], self._combine(name), **window)
        return tuple(found) if made.type.startswith("(") else found[0]

    def _select_and_scatter(self, made: Instruction, x: Any, source: Any, init: Any) -> Any:
        (selected,), (scattered,), (window, _) = made.called("select"), made.called("scatter"), window_of(made)
        compared = self.module.computations[selected]
        chosen = {"GE": lax.ge_p, "LE": lax.le_p}[compared.instructions[compared.root].text("direction")]
        if (self._operation(selected), self._operation(scattered), is_neutral("add", init)) != (
            "compare",
            "add",
            True,
        ):
            raise NotImplementedError
        del window["base_dilation"], window["window_dilation"]
        return primitives.select_and_scatter_add_p.bind(source, x, select_prim=chosen, **window)

    def _scatter(self, made: Instruction, x: Any, indices: Any, *updates: Any) -> Any:
        computation = self.module.computations[made.called("to_apply")[0]]
        root, (update,) = computation.instructions[computation.root], updates
        is_update = root.opcode == "parameter" and root.number == 1
        scatter = SCATTERED["" if is_update else self._operation(made.called("to_apply")[0]) or "none"]
        numbers = lax.ScatterDimensionNumbers(
            *map(made.numbers, ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims")),
            *map(made.numbers, ("input_batching_dims", "scatter_indices_batching_dims")),
        )
        dropped = lax.GatherScatterMode.FILL_OR_DROP
        return scatter(x, vectors_last(made, indices), update, numbers, mode=dropped)

    def _sort(self, made: Instruction, *x: Any) -> Any:
        comparator = self.module.computations[made.called("to_apply")[0]]
        keys = sort_keys(comparator, comparator.root)
        if not keys or keys != tuple(range(len(keys))):
            raise NotImplementedError("it does not sort by its first operands in rising order")
        (dim,), is_stable = made.numbers("dimensions"), made.text("is_stable") == "true"
        found = lax.sort(x, dimension=dim, is_stable=is_stable, num_keys=len(keys))
        return tuple(found) if made.type.startswith("(") else found[0]

    def _while(self, made: Instruction, x: Any) -> Any:
        condition, body = (made.called(attribute)[0] for attribute in ("condition", "body"))
        return lax.while_loop(lambda x: self.run(condition, [x]), lambda x: self.run(body, [x]), x)

    def _conditional(self, made: Instruction, index: Any, *x: Any) -> Any:
        names = [name for attribute in BRANCHES for name in made.called(attribute)]
        branches = [lambda *x, i=i, name=name: self.run(name, [x[i]]) for i, name in enumerate(names)]
        if index.dtype == np.bool_:
            return lax.cond(index, *branches, *x)
        last = np.int32(len(branches) - 1)  # of an index that is out of range
        return lax.switch(lax.select(lax.lt(index, np.int32(0)), last, index), branches, *x)

    def _call(self, made: Instruction, *x: Any) -> Any:
        return self.run(made.called("to_apply")[0], x)

    # What devices do together.

    def _partition_id(self, made: Instruction) -> Any:
        return (
            lax.convert_element_type(lax.axis_index(self.mesh.atoms), np.uint32) if self.mesh.size > 1 else np.uint32(0)
        )

    def _on_groups(self, made: Instruction, x: Sequence[Any], run: Callable[..., Any]) -> Any:
        """Runs a collective on each operand; JAX names the groups by axes where they are such, or lists them."""
        groups = groups_of(made, self.module, ordered=True)
        size, atoms = len(groups[0]), self.mesh.atom_sizes
        if any(len(group) != size for group in groups):
            raise NotImplementedError("groups differ in size")
        places = np.unravel_index(groups[0], tuple(atoms.values())) if atoms else ()
        axes = tuple(atom for atom, place in zip(atoms, places, strict=True) if len(np.unique(place)) > 1)
        named: dict[str, Any] = {"axis_name": axes}
        if {*device_groups(tuple(atoms.items()), axes)} != {*groups}:
            named = {"axis_name": self.mesh.atoms, "axis_index_groups": groups}
        found = tuple(y if size == 1 else run(y, **named) for y in x)
        return found if made.type.startswith("(") else found[0]

    def _all_reduce(self, made: Instruction, *x: Any) -> Any:
        operation = self._operation(made.called("to_apply")[0])
        collective = {"add": lax.psum, "maximum": lax.pmax, "minimum": lax.pmin}.get(operation)

        def reduced(y: Any, **groups: Any) -> Any:
            if collective is not None and y.dtype != np.bool_:
                return collective(y, **groups)
            return REDUCED[operation][0](lax.all_gather(y, **groups), (0,))

        return self._on_groups(made, x, reduced)

    def _reduce_scatter(self, made: Instruction, *x: Any) -> Any:
        (dim,), operation = made.numbers("dimensions"), self._operation(made.called("to_apply")[0])

        def scattered(y: Any, **groups: Any) -> Any:
            if operation == "add" and y.dtype != np.bool_:
                return lax.psum_scatter(y, scatter_dimension=dim, tiled=True, **groups)
            part = shape_of(made)[dim]
            parts = lax.all_to_all(y, split_axis=dim, concat_axis=dim, tiled=True, **groups)
            parts = lax.reshape(parts, (*y.shape[:dim], y.shape[dim] // part, part, *y.shape[dim + 1 :]))
            return REDUCED[operation][0](parts, (dim,))

        return self._on_groups(made, x, scattered)

    def _all_gather(self, made: Instruction, *x: Any) -> Any:
        (dim,) = made.numbers("dimensions")
        return self._on_groups(made, x, functools.partial(lax.all_gather, axis=dim, tiled=True))

    def _all_to_all(self, made: Instruction, *x: Any) -> Any:
        dim, *_ = made.numbers("dimensions") or (0,)
        exchange = functools.partial(lax.all_to_all, split_axis=dim, concat_axis=dim, tiled=True)
        if not made.type.startswith("("):
            return self._on_groups(made, x, exchange)
        parts = lax.concatenate([lax.expand_dims(y, (0,)) for y in x], 0)  # one operand for each member of a group
        (found,) = self._on_groups(made, [parts], exchange)
        return tuple(lax.index_in_dim(found, i, keepdims=False) for i in range(len(x)))

    def _collective_permute(self, made: Instruction, *x: Any) -> Any:
        pairs, alone = pairs_of(made), self.mesh.size == 1
        found = tuple(y if alone and pairs else lax.ppermute(y, self.mesh.atoms, pairs) for y in x)
        return found if made.type.startswith("(") else found[0]

    def _collective_broadcast(self, made: Instruction, *x: Any) -> Any:
        return self._on_groups(made, x, lambda y, **groups: lax.squeeze(lax.all_gather(y, **groups)[:1], (0,)))
