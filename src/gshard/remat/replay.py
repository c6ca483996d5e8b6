"""Traces a changed block of a per-device program into a per-device program again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from gshard.comm.collectives import KINDS, sent_bytes, sent_sizes
from gshard.core.jax_adapter import no_mesh_set, optimization_barrier_p, shapes_of
from gshard.core.jax_adapter_context import wide_enough_for
from gshard.core.jax_adapter_retracing import with_mapping
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Equation, Value
from gshard.core.spmd import RECOMPUTED, Collective, SpmdProgram
from gshard.core.xla_workarounds import opaque_identity
from gshard.device.fusion_model import COLLECTIVE, Kernels, kernels_of
from gshard.language.region import Interpreter


@no_mesh_set()
def replayed(spmd: SpmdProgram, before: Kernels, block: Block) -> SpmdProgram:
    """The program with another block of equations."""
    devices = spmd.mesh.devices
    on_cpu = devices is not None and devices[0].platform == "cpu"
    interpreter = _WithOpaqueBarriers(frozenset(before.block.walk()) if on_cpu else None)
    (mapping,) = spmd.jaxpr.jaxpr.eqns
    mapped = jax.shard_map(
        lambda *arrays: interpreter.run(block, arrays),
        mesh=spmd.mesh.jax_mesh,
        in_specs=tuple(mapping.params["in_specs"]),
        out_specs=list(mapping.params["out_specs"]),
        check_vma=False,
    )

    def program(*arrays: Any) -> list[Any]:
        return with_mapping(spmd.jaxpr.jaxpr, mapped, (*spmd.jaxpr.consts, *arrays))

    wide = wide_enough_for(v.dtype for v in block.values())
    with jax.sharding.use_abstract_mesh(spmd.mesh.abstract_jax_mesh), wide:
        jaxpr = jax.make_jaxpr(program)(*shapes_of(spmd.jaxpr.in_avals))
    return dataclasses.replace(spmd, jaxpr=jaxpr, collectives=_noted(spmd, before, kernels_of(block)))


@dataclasses.dataclass(frozen=True)
class _WithOpaqueBarriers(Interpreter):
    """Runs blocks on one device's parts unchanged. Barriers outside of ``own_equations`` become opaque identities."""

    own_equations: frozenset[Equation] | None

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation."""
        if self.own_equations is not None and e.primitive is optimization_barrier_p and e not in self.own_equations:
            return [*opaque_identity(inputs[:-1], inputs[-1]), inputs[-1]]
        return super().equation(e, inputs)


_Attributes = tuple[str, tuple[str, ...], int, int, str, str]


def _noted(spmd: SpmdProgram, before: Kernels, after: Kernels) -> tuple[Collective, ...]:
    """The collectives that the new program reports, without those that are gone and with those that are new.

    Equal collectives in overlapping windows may be gone too: equal equations are one after they are read back.
    """
    equations = dict(_attributes(after, spmd.mesh))
    old, new = (Counter(attributes for attributes, _ in _attributes(kernels, spmd.mesh)) for kernels in (before, after))
    count_left: Counter[tuple[str, tuple[str, ...], int, int]] = Counter()
    for attributes, count in new.items():
        count_left[attributes[:4]] += count
    kept = []
    for c in spmd.collectives:
        if count_left[c.kind, c.atoms, c.bytes, c.times]:
            count_left[c.kind, c.atoms, c.bytes, c.times] -= 1
            kept.append(c)
    for attributes in (*(new - old).elements(), *new.elements()):
        if count_left[attributes[:4]]:
            count_left[attributes[:4]] -= 1
            kind, atoms, sent, times, shape, line = attributes
            e = equations[attributes]
            kept.append(Collective(kind, atoms, sent, times, shape, line, RECOMPUTED, cause=e, emitted=e))
    return tuple(kept)


def _attributes(kernels: Kernels, mesh: Mesh) -> Iterator[tuple[_Attributes, Equation]]:
    for kernel, times in kernels.walk():
        if kernel.kind == COLLECTIVE:
            e = kernel.equation
            axes: Any = e.params.get("axes", e.params.get("axis_name"))
            atoms = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
            operands = [v for v in e.inputs if isinstance(v, Value)]
            for bytes_of_array, v in zip(sent_sizes(e.name, [v.bytes for v in operands]), operands, strict=False):
                shape = f"{v.dtype_name}[{','.join(map(str, v.shape))}]"
                sent = sent_bytes(KINDS[e.name], bytes_of_array, mesh.count(atoms))
                yield (KINDS[e.name], atoms, sent, times, shape, e.line), e
