"""Compile: the per-device program becomes an executable, by XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from gshard.core.errors import MeshError
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.jax_adapter_dispatch import executed, names_devices
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tabulated, with_tables
from gshard.core.processes import Group
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.core.xla_workarounds import runnable
from gshard.passes.partition import spec


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A program for XLA, compiled when it is first needed.

    Attributes:
        spmd: the program it is made of.
        function: the jitted function of all inputs, captured arrays first.
    """

    spmd: SpmdProgram
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> list[Any]:
        """Runs on flat arguments that have the shardings of the program; results are flat global arrays."""
        self.agree()
        spmd, every = self.spmd, [*self.captured, *arguments]
        for i in spmd.in_orders:
            every[i] = relabelled(every[i], named_sharding(spmd.mesh, spmd.in_shardings[i]))
        results = executed(self.compiled, every)
        if self._calls_back:
            results = [relabelled(x, s) for x, s in zip(results, self._out_shardings, strict=True)]
        for i, order in spmd.out_orders.items():
            results[i] = relabelled(results[i], named_sharding(spmd.mesh.reordered(order), spmd.out_shardings[i]))
        return results

    def agree(self) -> None:
        """Compares the program with that of the other processes of its mesh, if there are any, when first called.

        Raises:
            PlanError: another process is about to run another program.
        """
        self._agreed  # noqa: B018  once

    @functools.cached_property
    def _agreed(self) -> None:
        group = Group.of(self.spmd.mesh.devices)
        if group is not None:
            group.agree(self.spmd.program.name, self.spmd.identified())

    @functools.cached_property
    def _calls_back(self) -> bool:
        return names_devices(self.spmd.jaxpr)

    @functools.cached_property
    def _out_shardings(self) -> list[NamedSharding]:
        return [named_sharding(self.spmd.mesh, s) for s in self.spmd.out_shardings]

    @functools.cached_property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the function closed over, placed on the mesh once."""
        mesh, shardings = self.spmd.mesh, self.spmd.in_shardings
        return tuple(
            jax.device_put(x, named_sharding(mesh, s))
            for x, s in zip(self.spmd.program.captured, shardings, strict=False)
        )

    @functools.cached_property
    def lowered(self) -> Any:
        """JAX's lowered object, StableHLO for all devices."""
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in self.spmd.jaxpr.in_avals]
        # The atoms replace whatever mesh the caller has set: they are the same devices under other names.
        with no_mesh_set(), jax.sharding.use_abstract_mesh(self.spmd.mesh.abstract_jax_mesh):
            return self.function.lower(*shapes)  # type: ignore[attr-defined]

    @functools.cached_property
    def compiled(self) -> Any:
        """JAX's compiled object: ``as_text()``, ``memory_analysis()``, ``cost_analysis()``."""
        return self.lowered.compile()

    def __str__(self) -> str:
        return f"executable {self.spmd.program.name} on {self.spmd.mesh}\n{self.compiled.as_text()}"


def relabelled(x: Any, sharding: NamedSharding) -> Any:
    """The same parts on the same devices, said to be those of another sharding: nothing is moved."""
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def named_sharding(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """A sharding as JAX's, over the user's own mesh; over its atoms where a part of an axis splits a dimension."""
    return _named_sharding(mesh, sharding, mesh.given)


@tabulated(4096)
def _named_sharding(mesh: Mesh, sharding: Sharding, _: Any) -> NamedSharding:
    # Meshes are equal whatever mesh of JAX's they were read from, so that one is a part of the key.
    own = mesh.spec_of(sharding.dims)
    return over_atoms(mesh, sharding) if own is None else NamedSharding(mesh.user_jax_mesh, own)


def over_atoms(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """A sharding as JAX's, over the atoms of the mesh."""
    return NamedSharding(mesh.jax_mesh, spec(sharding))


@with_tables
def compile_spmd(
    spmd: SpmdProgram,
    donated: frozenset[int] = frozenset(),
    *,
    keep_unused: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Executable:
    """Makes a per-device program runnable.

    Args:
        spmd: the program; its mesh must have devices.
        donated: arguments (counted without captured arrays) whose memory results may take.
        keep_unused: whether XLA is given arguments that nothing reads.
        compiler_options: XLA's, as for ``jax.jit``.

    Raises:
        MeshError: the mesh is abstract.
    """
    if spmd.mesh.devices is None:
        raise MeshError(
            "a program planned for an abstract mesh cannot run.",
            got=f"mesh: {spmd.mesh}",
            hint="Give gshard.jit a jax.sharding.Mesh or a number of devices.",
        )
    captured = len(spmd.program.captured)
    run = runnable(spmd.jaxpr)

    def program(*arrays: Any) -> list[Any]:
        return list(run(*arrays))

    # XLA calls the program, and profilers what it runs, by the name of the user's function.
    program.__name__ = program.__qualname__ = spmd.program.name
    said = over_atoms if names_devices(spmd.jaxpr) else named_sharding
    function = jax.jit(
        program,
        in_shardings=[said(spmd.mesh, s) for s in spmd.in_shardings],
        out_shardings=[said(spmd.mesh, s) for s in spmd.out_shardings],
        donate_argnums=tuple(sorted(captured + i for i in donated)),
        keep_unused=keep_unused,
        compiler_options=None if compiler_options is None else dict(compiler_options),
    )
    return Executable(spmd, function)
