"""export_plan: a plan that was searched, for use with ``jax.jit`` and without gshard."""

from __future__ import annotations

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.explanation.exported_plan import ExportedPlan, exported_plan
from gshard.explanation.search_result import SearchResult


@without_our_frames
def export_plan(found: SearchResult) -> ExportedPlan:
    """Writes a plan as shardings and sharding constraints for ``jax.jit``, and compiles the program to check them.

    XLA's partitioner decides what these leave open, and it may send more than the plan. So the program is compiled with
    them, and what XLA sends is compared with the plan, in all and line by line.

    Args:
        found: what ``gshard.search`` returned.

    Returns:
        ``in_shardings`` and ``out_shardings`` as ``PartitionSpec``, the constraints that XLA needs besides, and the
        comparison; print it. The program that is compiled is the function as gshard traced it, for the devices of the
        mesh; for an abstract mesh by libtpu if the machine is a TPU, and else for the first devices that JAX has.

    Raises:
        ArgumentError: this is no result of a search for a plan, or a framework jits the function. MeshError,
            PlanningError: there are no devices to compile for; libtpu is missing, for a TPU.

    >>> import jax
    >>> from gshard.api.search import search
    >>> w, x = jax.ShapeDtypeStruct((8192, 8192), "float32"), jax.ShapeDtypeStruct((8, 8192), "float32")
    >>> exported = export_plan(search(lambda w, x: x @ w, w, x, mesh={"data": 8}, machine="h100:1x8"))
    >>> exported.in_shardings, exported.follows_plan
    ((P(None, 'data'), P(None, None)), True)
    """
    if not isinstance(found, SearchResult):
        raise ArgumentError(
            f"gshard.stages.export_plan takes what gshard.search returned, not {type(found).__name__}.",
            user_line(),
            hint="Write gshard.stages.export_plan(gshard.search(f, x, mesh=8, machine='h100:1x8')).",
        )
    found.refuse_framework()
    return exported_plan(found)
