"""configure: finds the configuration of a training step that takes the least time on a cluster.

A configuration is: the keywords of a builder (micro-batches, recomputation, anything else that the step has), the
memory of the optimizer state, a mesh, and a plan. The search goes from cheap figures to expensive ones:

1. Every combination of keywords is built, traced and estimated: time and memory if devices shared everything evenly
   (``search.screening``). If the update alone reads a part of the state, there is a second configuration with that part
   in the memory of the host (``search.state_on_host``).
2. Configurations that cannot fit are dropped. The others are ordered by their estimates. In this order the plans that
   people write by hand are priced, on the first mesh, until no estimate is below the best price.
3. The problems of the best configurations are solved on every mesh, as in ``gshard.search``, which also recomputes
   values to fit. Again, what is estimated to be no faster than the best price is left out. If meshes may have any
   shape, meshes with three axes are tried for the best configuration.

Each problem that is solved has a bound in the simplified model; the others have that of their products. The smallest is
the bound over all configurations, on meshes with up to two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gshard.api.configuration import Configuration
from gshard.api.configurations import Configurations
from gshard.api.configure_run import ConfigureRun
from gshard.api.search import is_number_of_devices, meshes_to_try
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import Mesh
from gshard.device.machine import Machine, machine_of
from gshard.remat.rematerialise import bytes_of
from gshard.search.builder_choices import choices_of
from gshard.search.time_budget import TimeBudget, seconds_of, stoppable


@without_our_frames
def configure(
    step_builder: Callable[..., Any],
    *,
    devices: int | None = None,
    mesh: Any = None,
    machine: str | Machine | None = None,
    global_batch: int | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    offload: bool = True,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    finite: bool = False,
    on_better: Callable[[Configuration], None] | None = None,
    progress: bool | Callable[[str], object] | None = None,
) -> Configurations:
    """Finds the configuration of a training step with the lowest modelled time on a machine, among those that fit.

    It chooses the keywords of a builder, whether the optimizer state is in the memory of the host, the mesh, the
    sharding of every value, and what gshard recomputes to fit.

    Args:
        step_builder: a function of keywords that returns ``(step, *arguments)`` as ``gshard.search`` takes them: a
            function, or one from ``gshard.jit``, ``jax.jit``, ``flax.nnx.jit`` or ``equinox.filter_jit``, and arrays or
            ``jax.ShapeDtypeStruct``. It returns None for keywords that it has no step for. Its keywords get these
            values: those of ``choices``; those of an annotation ``Literal[...]`` or ``bool``; ``micro_batches`` the
            divisors of ``global_batch``; ``recompute`` four names in ``jax.checkpoint_policies``, from
            ``everything_saveable`` to ``nothing_saveable``; ``global_batch`` that number. Others keep their default.
        devices: the number of devices: every mesh shape with up to two axes is tried, and for the best configuration
            meshes with three axes, near its plans on meshes with two. By default those of ``machine``.
        mesh: instead of ``devices``, a mesh or a list of meshes to choose from, as for ``gshard.search``.
        machine: what the devices are, such as ``"h100:8x8"``; by default what the mesh's devices are.
        global_batch: examples of one step, in all micro-batches together.
        choices: for keywords of the builder, the values to choose from.
        offload: whether the part of a donated state that the update alone reads may be in the memory of the host. This
            is tried for plain functions, on machines with a figure of the link to the host.
        memory_limit, static_argnums, static_argnames, donate_argnums, donate_argnames, finite: as for
            ``gshard.search``; donate the training state.
        budget_seconds: how long everything together may take. It takes longer by no more than one planning of one step,
            and of data parallelism and FSDP if no mark splits the step. With None it ends once all configurations are
            searched or estimated to be no faster, after 300 seconds at the latest. With a number, the time that is left
            then goes to the problems of the others, which raises the bound.
        on_better: called with each configuration that is the best so far and fits.
        progress: as for ``gshard.search``.

    Returns:
        the configurations, the best first; print them. ``found.best.jit()`` is the partitioned step,
        ``found.best.save(path)`` writes the configuration for ``gshard.stages.Configuration.load``. Ctrl-C and SIGTERM
        end the search early, as they end ``gshard.search``.

    Raises:
        ArgumentError: the builder has no keyword to choose, or returns no step; a keyword has no values;
            ``global_batch`` is not divided evenly by ``choices`` of micro-batches.
        MemoryLimitError: no configuration fits. The message names the nearest.
        MachineError, MeshError, ShardingError, TraceError: as for ``gshard.search``.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def build(micro_batches):
    ...     def step(w, x):
    ...         rounds = x.reshape(-1, micro_batches, 1024).swapaxes(0, 1)
    ...         add = lambda total, part: (total + jnp.mean(part @ w), None)
    ...         return jax.lax.scan(add, 0.0, rounds)[0]
    ...     return step, jax.ShapeDtypeStruct((1024, 4096), "float32"), jax.ShapeDtypeStruct((64, 1024), "float32")
    >>> found = configure(build, devices=8, machine="h100:1x8", global_batch=64, choices={"micro_batches": [1, 4]})
    >>> found.best.keywords
    {'micro_batches': 1}
    """
    budget = TimeBudget.of(seconds_of(budget_seconds), progress)
    budget.progress.name = "gshard.configure"
    found, fixed = choices_of(step_builder, global_batch, choices)
    own = {
        "static_argnums": static_argnums, "static_argnames": static_argnames,
        "donate_argnums": donate_argnums, "donate_argnames": donate_argnames,
    }  # fmt: skip
    meshes = _meshes(devices, mesh, machine)
    any_shape = mesh is None or is_number_of_devices(mesh)
    on = Machine.read(machine_of(meshes[0]) if machine is None else machine, meshes[0].size)
    limit = float(on.memory if memory_limit is None else bytes_of(memory_limit))
    run = ConfigureRun(
        step_builder, found, fixed, {**own, "finite": finite}, meshes, any_shape, machine, on, limit,
        None if global_batch is None else int(global_batch), offload, budget_seconds is not None, on_better, configure,
        budget,
    )  # fmt: skip
    with stoppable() as stop:
        made = run.found(stop)
        if made is not None:
            return made
    stop.deliver()
    raise KeyboardInterrupt


def _meshes(devices: int | None, mesh: Any, machine: str | Machine | None) -> list[Mesh]:
    """The meshes to try."""
    if devices is not None and mesh is not None:
        raise ArgumentError(
            "gshard.configure takes devices= or mesh=, not both.",
            user_line(),
            f"devices={devices!r}, mesh={mesh!r}",
            "Give devices= to try all mesh shapes, or mesh= to use that mesh.",
        )
    if devices is None and mesh is None:
        if machine is None:
            raise ArgumentError(
                "gshard.configure needs the number of devices.", user_line(), hint="Give devices=64, or a mesh."
            )
        devices = (machine if isinstance(machine, Machine) else Machine.of(machine)).size
    return list(meshes_to_try(devices if mesh is None else mesh))
