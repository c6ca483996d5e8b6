"""Lowered: one function on its way to the devices, for one kind of arguments; every stage can be looked at."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gshard.analysis.machine import Machine, kind_of_devices
from gshard.api.transformations import Target
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.core.uneven import UnevenArray
from gshard.passes.compile import Executable, compile_spmd, named_sharding
from gshard.passes.partition import partition
from gshard.remat.fit import compiled_within
from gshard.remat.rematerialise import rematerialise


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One function made ready for one kind of arguments; each stage is made when it is first asked for.

    Attributes:
        program: the traced function.
        target: what it is partitioned for.
        donated: arguments whose memory the results may take.
        padded: inputs that come in padded parts, and how they lie.
        keep_uneven: whether results leave so.
        memory_limit: bytes that a device may hold; what does not fit is recomputed.
        machine: tells what that takes; None takes the devices of the mesh.
    """

    program: Program
    target: Target
    donated: frozenset[int]
    padded: Mapping[int, Sharding] = dataclasses.field(default_factory=dict)
    keep_uneven: bool = False
    memory_limit: int | None = None
    machine: Machine | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.target.mesh

    @functools.cached_property
    def plan(self) -> Plan:
        """The sharding of every value, and why."""
        return self.target.plan(self.program)

    @functools.cached_property
    def spmd(self) -> SpmdProgram:
        """The one program that all devices run."""
        made = self._all_kept
        if self.memory_limit is not None:
            made = rematerialise(made, self.memory_limit, self._machine, self.donated)
        self.target.check(self.plan, made)
        return made

    @functools.cached_property
    def _all_kept(self) -> SpmdProgram:
        first = len(self.program.captured)
        donated = [first + i for i in sorted(self.donated)]
        return partition(self.plan, self.padded, keep_uneven=self.keep_uneven, donated=donated)

    @property
    def _machine(self) -> Machine:
        return self.machine or Machine.of(kind_of_devices(self.mesh), self.mesh.size)

    @property
    def argument_shardings(self) -> tuple[Any, ...]:
        """Where each flat argument is expected, as JAX's ``NamedSharding``: what lies so is not moved by a call."""
        first, spmd = len(self.program.captured), self.spmd
        return tuple(
            named_sharding(self.mesh.reordered(spmd.in_orders.get(i, self.mesh.order)), s)
            for i, s in enumerate(spmd.in_shardings)
            if i >= first
        )

    def results(self, arrays: Sequence[Any]) -> Any:
        """The executable's flat results as the user gets them: a pytree, what left in padded parts as what it is."""
        found = zip(self.program.block.outputs, self.spmd.out_shardings, arrays, strict=True)
        orders, mesh = self.spmd.out_orders, self.mesh
        leaves = [
            x if s.is_even(mesh, v.shape) else UnevenArray(x, v.shape, s, mesh.reordered(orders.get(i, mesh.order)))
            for i, (v, s, x) in enumerate(found)
        ]
        return jax.tree.unflatten(self.program.out_tree, leaves)

    @functools.cached_property
    def executable(self) -> Executable:
        """The compiled program; call it with the flat arguments.

        Where the compiler needs more memory than was modelled, it recomputes more than ``spmd`` to keep to the limit.
        """
        if self.memory_limit is None:
            return compile_spmd(self.spmd, self.donated)
        return compiled_within(self.spmd, self._all_kept, self.memory_limit, self._machine, self.donated)

    def __str__(self) -> str:
        return f"{self.plan}\n\n{self.spmd}"
