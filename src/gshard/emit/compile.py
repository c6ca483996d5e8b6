"""Compiles the per-device program with XLA."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from gshard.core.errors import MeshError
from gshard.core.jax_adapter import no_mesh_set, put_all, relabelled, shapes_of
from gshard.core.jax_adapter_context import dtypes_in, in_context, wide_enough_for
from gshard.core.jax_adapter_dispatch import executed, kept_arguments, names_devices
from gshard.core.memory_kinds import DEVICE, in_memory
from gshard.core.mesh import Mesh
from gshard.core.phases import phase
from gshard.core.planning_tables import tabulated, with_tables
from gshard.core.processes import Group
from gshard.core.program import NO_CONTEXT
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.core.xla_workarounds import runnable
from gshard.emit.partition import spec


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A program for XLA, compiled at its first use.

    Attributes:
        spmd: the per-device program.
        function: the jitted function of all inputs, captured arrays first.
    """

    spmd: SpmdProgram
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> list[Any]:
        """Runs on flat arguments in the shardings of the program. Results are flat global arrays."""
        self.agreed  # noqa: B018  compares the program at the first call
        spmd, inputs = self.spmd, [*self.captured, *arguments]
        # Arguments that XLA does not read stay where they are.
        for i in spmd.in_orders and spmd.in_orders.keys() & kept_arguments(self.compiled):
            input_sharding = named_sharding(spmd.mesh, spmd.in_shardings[i], spmd.program.input_memory(i))
            inputs[i] = relabelled(inputs[i], input_sharding)
        results = executed(self.compiled, inputs)
        if self._calls_back:
            results = [relabelled(x, s) for x, s in zip(results, self._out_shardings, strict=True)]
        for i, order in spmd.out_orders.items():
            memory = spmd.program.output_memory(i)
            output_sharding = named_sharding(spmd.mesh.reordered(order), spmd.out_shardings[i], memory)
            results[i] = relabelled(results[i], output_sharding)
        return results

    @functools.cached_property
    def agreed(self) -> None:
        """Compares the program, once, with those of the other processes of its mesh, if there are any.

        Raises:
            PlanError: another process is about to run another program.
        """
        group = Group.of(self.spmd.mesh.devices)
        if group is not None:
            group.agree(self.spmd.program.name, self.spmd.identified())

    @functools.cached_property
    def _calls_back(self) -> bool:
        return names_devices(self.spmd.jaxpr)

    @functools.cached_property
    def _out_shardings(self) -> list[NamedSharding]:
        mesh, memory = self.spmd.mesh, self.spmd.program.output_memory
        return [named_sharding(mesh, s, memory(i)) for i, s in enumerate(self.spmd.out_shardings)]

    @functools.cached_property
    def captured(self) -> tuple[Any, ...]:
        """The captured arrays of the function, placed on the mesh once."""
        mesh, captured, memory = self.spmd.mesh, self.spmd.program.captured, self.spmd.program.input_memory
        own = enumerate(self.spmd.in_shardings[: len(captured)])
        return tuple(put_all(captured, [named_sharding(mesh, s, memory(i)) for i, s in own]))

    @functools.cached_property
    def lowered(self) -> Any:
        """JAX's lowered object, StableHLO for all devices."""
        with phase("lowering", self.spmd.program.name, self.spmd.mesh.size):
            return _lowered(self.spmd, self.function)

    @functools.cached_property
    def compiled(self) -> Any:
        """JAX's compiled object: ``as_text()``, ``memory_analysis()``, ``cost_analysis()``."""
        lowered = self.lowered
        with phase("compiling", self.spmd.program.name, self.spmd.mesh.size):
            return lowered.compile()


def named_sharding(mesh: Mesh, sharding: Sharding, memory: str = DEVICE) -> NamedSharding:
    """A sharding as a ``NamedSharding`` over the user's mesh, or over its atoms if it splits by a part of an axis."""
    return in_memory(_named_sharding(mesh, sharding, mesh.given), memory)


@tabulated(4096)
def _named_sharding(mesh: Mesh, sharding: Sharding, _: Any) -> NamedSharding:
    # Equal meshes may come from different meshes of JAX's, so the given one is a part of the key.
    user_spec = mesh.spec_of(sharding.dims)
    return over_atoms(mesh, sharding) if user_spec is None else NamedSharding(mesh.user_jax_mesh, user_spec)


def over_atoms(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """A sharding as a ``NamedSharding`` over the atoms of the mesh."""
    return NamedSharding(mesh.jax_mesh, spec(sharding))


@with_tables
def compile_spmd(
    spmd: SpmdProgram,
    donated: frozenset[int] = frozenset(),
    *,
    keep_unused: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Executable:
    """Makes a per-device program runnable."""
    if spmd.mesh.devices is None:
        raise MeshError(
            "a program planned for an abstract mesh cannot run.",
            got=f"mesh: {spmd.mesh}",
            hint="Give gshard.jit a jax.sharding.Mesh or a number of devices.",
        )
    return Executable(spmd, _jitted(spmd, (), donated, keep_unused, compiler_options))


compile = compile_spmd  # its public name, which hides one of Python's


def _jitted(
    spmd: SpmdProgram,
    constants: Sequence[Any],
    donated: frozenset[int],
    keep_unused: bool,
    compiler_options: Mapping[str, Any] | None,
    as_jax: Callable[[Mesh, Sharding], NamedSharding] | None = None,
) -> Callable[..., Any]:
    """The program as a jitted function. Its first inputs may be constants."""
    first_argument = len(spmd.program.captured) - len(constants)
    run = runnable(spmd.jaxpr)

    def program(*arrays: Any) -> list[Any]:
        return list(run(*constants, *arrays))

    # XLA and profilers show the program under the name of the user's function.
    program.__name__ = program.__qualname__ = spmd.program.name
    as_jax = as_jax or (over_atoms if names_devices(spmd.jaxpr) else named_sharding)
    input_memory, output_memory = spmd.program.input_memory, spmd.program.output_memory
    input_shardings = [in_memory(as_jax(spmd.mesh, s), input_memory(i)) for i, s in enumerate(spmd.in_shardings)]
    output_shardings = [in_memory(as_jax(spmd.mesh, s), output_memory(i)) for i, s in enumerate(spmd.out_shardings)]
    return jax.jit(
        program,
        in_shardings=input_shardings[len(constants) :],
        out_shardings=output_shardings,
        donate_argnums=tuple(sorted({first_argument + i for i in donated} - _moved_references(spmd))),
        keep_unused=keep_unused,
        compiler_options=None if compiler_options is None else dict(compiler_options),
    )


def compiled_with_constants(
    executable: Executable,
    donated: frozenset[int],
    *,
    keep_unused: bool,
    compiler_options: Mapping[str, Any] | None,
) -> Any:
    """JAX's compiled object with the captured arrays as constants, so that it takes the arguments only."""
    spmd = executable.spmd
    constants = _constants(spmd)
    function = _jitted(spmd, constants, donated, keep_unused, compiler_options)
    return _lowered(spmd, function, len(constants)).compile()


def _constants(spmd: SpmdProgram) -> list[Any]:
    """The captured arrays. Constants of a program are whole on each device: host arrays, except random keys."""
    extended = jax.dtypes.extended
    return [x if jax.dtypes.issubdtype(x.dtype, extended) else np.asarray(x) for x in spmd.program.captured]


def _lowered(spmd: SpmdProgram, function: Any, first: int = 0) -> Any:
    shapes = shapes_of(spmd.jaxpr.in_avals[first:])
    with _alone(spmd):
        return function.lower(*shapes)


@contextlib.contextmanager
def _alone(spmd: SpmdProgram) -> Iterator[None]:
    """What JAX lowers inside is the program of the devices, whatever mesh and settings the caller has set."""
    # The atoms replace any mesh that the caller has set: they are the same devices under other names.
    atom_mesh = jax.sharding.use_abstract_mesh(spmd.mesh.abstract_jax_mesh)
    with no_mesh_set(), in_context(NO_CONTEXT), atom_mesh, wide_enough_for(dtypes_in(spmd.jaxpr)):
        yield


def exported(spmd: SpmdProgram, donated: frozenset[int], platform: str) -> tuple[jax.export.Exported, AbstractMesh]:
    """The program of flat arguments as ``jax.export`` has it, with its captured arrays as constants, and its mesh.

    The mesh has the axes of the user's mesh, or its atoms if shardings are not over whole axes.

    Args:
        spmd: the per-device program, with its devices in the order of the mesh.
        donated: arguments whose memory the results may take.
        platform: the devices that run it: ``cpu``, ``tpu``, ``cuda`` or ``rocm``.
    """
    by_axes = all(spmd.mesh.spec_of(s.dims) is not None for s in (*spmd.in_shardings, *spmd.out_shardings))
    given = spmd.mesh.user_jax_mesh if by_axes else spmd.mesh.jax_mesh
    mesh = AbstractMesh(given.axis_sizes, given.axis_names, axis_types=(AxisType.Auto,) * len(given.axis_names))

    def as_jax(own: Mesh, sharding: Sharding) -> NamedSharding:
        return NamedSharding(mesh, (named_sharding if by_axes else over_atoms)(own, sharding).spec)

    constants = _constants(spmd)
    function: Any = _jitted(spmd, constants, donated, True, None, as_jax)
    with _alone(spmd):
        shapes = shapes_of(spmd.jaxpr.in_avals[len(constants) :])
        return jax.export.export(function, platforms=[platform])(*shapes), mesh


def _moved_references(spmd: SpmdProgram) -> set[int]:
    """The references whose final values leave in another sharding or order, so that these cannot take their memory."""
    count, outs = len(spmd.program.references), range(len(spmd.out_shardings))
    pairs = zip(spmd.program.references, outs[len(outs) - count :], strict=True)
    entry, leave = spmd.in_shardings, spmd.out_shardings
    return {i for i, j in pairs if (entry[i], spmd.in_orders.get(i)) != (leave[j], spmd.out_orders.get(j))}
