"""Plans a partitioned function inside ``jax.jit`` once XLA's partitioner has found the shardings of its operands.

    jax.jit(lambda xs, w: jax.lax.scan(lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), None), w, xs))

JAX lowers the body of a loop, or a nested ``jax.jit``, before the call of it, so that nothing says there how operands
are split. XLA's partitioner finds out. The call is left to it as an operator of its own
(``jax.experimental.custom_partitioning``): it asks for the per-device program, which is planned then, for operands as
they come.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from gshard.api.target import Target
from gshard.core.jax_adapter import closed, no_mesh_set, shapes_of
from gshard.core.jax_adapter_dispatch import weakly_cached
from gshard.core.jax_adapter_errors import carried_through_xla
from gshard.core.jax_adapter_lowering import ThreadSettings, has_devices, lowered_with_devices, under_settings
from gshard.core.jax_adapter_manual import with_mapping
from gshard.core.mark import Mark
from gshard.core.program import Constant, Program, Value
from gshard.core.spmd import SpmdProgram
from gshard.emit.compile import over_atoms
from gshard.language.mark_primitive import bind_mark
from gshard.naming.dimension_classes import dimensions_of
from gshard.tracing.expand import mark_of_any_sharding

Planned = Callable[[Any, Target, tuple[Mark | None, ...]], SpmdProgram]


def may_wait(ctx: Any, jaxpr: Any, target: Target) -> bool:
    """Whether a call can be left to XLA's partitioner: it has no effects, and the program is not exported."""
    plain = all(
        not jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) and a.size for a in (*jaxpr.in_avals, *jaxpr.out_avals)
    )
    if not plain or jaxpr.effects or target.mesh.devices is None or target.mesh.size == 1:
        return False
    return has_devices(ctx, target.mesh.size)


def lowered_at_partitioning(
    ctx: Any, operands: Sequence[Any], jaxpr: Any, target: Target, program: Program, planned: Planned
) -> Any:
    """Lowers a call to an operator that XLA asks for its per-device program."""
    body, constants = closed(jaxpr)
    first = len(constants)

    @custom_partitioning
    def call(*arrays: Any) -> list[Any]:
        return list(jaxpr_as_fun(ClosedJaxpr(body, arrays[:first]))(*arrays[first:]))

    settings = ThreadSettings.here()  # XLA may ask in a thread of its own

    def partition(_: Any, arrays: Sequence[Any], results: list[Any]) -> Any:
        with carried_through_xla(), no_mesh_set(), settings.set():
            spmd = planned(_with_marked_results(jaxpr, _marks(results)), target, _marks(arrays[first:]))
        said = [[over_atoms(spmd.mesh, s) for s in side] for side in (spmd.in_shardings, spmd.out_shardings)]
        return spmd.mesh.jax_mesh, _on_one_device(spmd, settings), said[1], tuple(said[0])

    call.def_partition(partition=partition, decode_shardings=False, sharding_rule=sharding_rule(program))
    # What XLA keeps on disk it finds by the text of a program, in which an operator is an address in this process.
    digest = hashlib.sha256(f"{jaxpr}\n{target}".encode()).hexdigest()

    def inline(*arrays: Any) -> list[Any]:
        with set_xla_metadata(gshard=digest):
            return list(call(*constants, *arrays))

    return lowered_with_devices(ctx, target.mesh.devices or (), inline, operands)


def _marks(arrays: Sequence[Any]) -> tuple[Mark | None, ...]:
    """The marks that XLA's shardings of some arrays are; none for parts that are not equal."""
    return tuple(
        None if x.sharding is None else dataclasses.replace(mark_of_any_sharding(x.sharding, x.shape), source_text="")
        for x in arrays
    )


@weakly_cached
def _with_marked_results(jaxpr: Any, marks: tuple[Mark | None, ...]) -> Any:
    """A closed jaxpr whose results are marked: as what reads them has them."""

    def marked(*arrays: Any) -> list[Any]:
        results = jaxpr_as_fun(jaxpr)(*arrays)
        return [x if m is None else bind_mark(x, m) for x, m in zip(results, marks, strict=True)]

    return jax.make_jaxpr(marked)(*shapes_of(jaxpr.in_avals))


def sharding_rule(program: Program) -> str:
    """Which dimensions of results are those of arguments, in Shardy's words: ``a b, c d -> a, e``.

    Before XLA asks for the per-device program it spreads shardings over all of the program around: by this from
    operands to results and back. Of dimensions of arguments alone nothing is said: none is split for another's sake.

    >>> import jax.numpy as jnp
    >>> from gshard.tracing.trace import trace
    >>> sharding_rule(trace(lambda x, w: x @ w, jnp.zeros((8, 4)), jnp.zeros((4, 2))))
    'a0 a1, a2 a3 -> a0 a3'
    """
    labels = dimensions_of(program).labels
    numbers = itertools.count()

    def factors(v: Value | Constant) -> list[Any]:
        """The dimension of the program that each one is, or a number of its own."""
        named = labels.get(v, ()) if isinstance(v, Value) else ()
        said = list(zip(named, v.shape, strict=True)) if named else []
        return [x if x[1] != 1 and said.count(x) == 1 else None for x in said] or [None] * len(v.shape)

    sides = [[factors(v) for v in side] for side in (program.block.inputs, program.block.outputs)]
    shared = set.intersection(*({x for dims in side for x in dims if x is not None} for side in sides))
    known: dict[Any, str] = {}

    def letter(x: Any) -> str:
        return known.setdefault(x, f"a{next(numbers)}") if x in shared else f"a{next(numbers)}"

    return " -> ".join(", ".join(" ".join(map(letter, dims)) for dims in side) for side in sides)


def _on_one_device(spmd: SpmdProgram, settings: ThreadSettings) -> Callable[..., list[Any]]:
    """What one device does, as a function of its parts, to be lowered under some settings of JAX's."""
    outer, tables = closed(spmd.jaxpr)
    (mapping,) = outer.eqns
    inner = ClosedJaxpr(mapping.params["jaxpr"], ())
    return lambda *parts: with_mapping(outer, lambda *xs: under_settings(inner, settings, xs), (*tables, *parts))
