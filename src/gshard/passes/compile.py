"""Compile: the per-device program becomes an executable, by XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from gshard.core.errors import MeshError
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.passes.partition import spec


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program.

    Attributes:
        spmd: the program it was made of.
        function: the jitted function of all inputs, captured arrays first.
        ready: the compiled object, if it was compiled beforehand.
    """

    spmd: SpmdProgram
    function: Callable[..., Any]
    ready: Any = None

    def __call__(self, *arguments: Any) -> list[Any]:
        """Runs on flat arguments; results are flat global arrays."""
        run = self.function if self.ready is None else self.ready
        spmd, every = self.spmd, [*self.captured, *arguments]
        for i in spmd.in_orders:
            every[i] = relabelled(every[i], named_sharding(spmd.mesh, spmd.in_shardings[i]))
        results = list(run(*every))
        for i, order in spmd.out_orders.items():
            results[i] = relabelled(results[i], named_sharding(spmd.mesh.reordered(order), spmd.out_shardings[i]))
        return results

    @functools.cached_property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the function closed over, placed on the mesh once."""
        mesh, shardings = self.spmd.mesh, self.spmd.in_shardings
        return tuple(
            jax.device_put(x, named_sharding(mesh, s))
            for x, s in zip(self.spmd.program.captured, shardings, strict=False)
        )

    @functools.cached_property
    def compiled(self) -> Any:
        """JAX's compiled object: ``as_text()``, ``memory_analysis()``, ``cost_analysis()``."""
        if self.ready is not None:
            return self.ready
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.spmd.jaxpr.in_avals]
        return self.function.lower(*shapes).compile()  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return f"executable {self.spmd.program.name} on {self.spmd.mesh}\n{self.compiled.as_text()}"


def relabelled(x: Any, sharding: NamedSharding) -> Any:
    """The same parts on the same devices, said to be those of another sharding: nothing is moved."""
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def named_sharding(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """A sharding as JAX's, over the atoms of the mesh."""
    return NamedSharding(mesh.jax_mesh, spec(sharding))


def compile_spmd(spmd: SpmdProgram, donated: frozenset[int] = frozenset()) -> Executable:
    """Makes a per-device program runnable.

    Args:
        spmd: the program; its mesh must have devices.
        donated: arguments (counted without captured arrays) whose memory results may take.

    Raises:
        MeshError: the mesh is abstract.
    """
    if spmd.mesh.devices is None:
        raise MeshError(
            "a program planned for an abstract mesh cannot run.",
            got=f"mesh: {spmd.mesh}",
            way_out="Give gshard.jit a jax.sharding.Mesh or a number of devices.",
        )
    captured = len(spmd.program.captured)
    function = jax.jit(
        jaxpr_as_fun(spmd.jaxpr),
        in_shardings=[named_sharding(spmd.mesh, s) for s in spmd.in_shardings],
        out_shardings=[named_sharding(spmd.mesh, s) for s in spmd.out_shardings],
        donate_argnums=tuple(sorted(captured + i for i in donated)),
        keep_unused=True,
    )
    return Executable(spmd, function)
