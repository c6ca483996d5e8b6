"""instead_of_jit: in a block, gshard partitions the functions that ``jax.jit`` would compile.

``nnx.jit``, ``eqx.filter_jit`` and others end in one function of JAX's that compiles a jaxpr. In the block gshard takes
its place (``core.jax_adapter_jit``), also for functions that were jitted before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import Any

import jax

from gshard.api.jit import Programs
from gshard.api.lowered import Lowered, by_dispatch, is_on_cpu, placed_arguments
from gshard.api.signature import Signature, committed_to
from gshard.api.target import Options
from gshard.core import jax_adapter_jit as by_jax
from gshard.core.errors import PlanError, ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import weakly_cached
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.layout import Layout
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.plan import Plan
from gshard.device.machine import Machine
from gshard.planning.collective_matmuls import CollectiveMatmul
from gshard.planning.saved_plan import SavedPlan

_log = logging.getLogger("gshard")


class OfJaxpr:
    """A partitioned function that JAX has traced already, of its flat arguments."""

    def __init__(self, jitted: by_jax.Jitted, options: Options):
        self._jitted = jitted
        options = dataclasses.replace(
            options,
            in_shardings=_or_none(jitted.in_shardings),
            out_shardings=_or_none(list(jitted.out_shardings)),
            keep_unused=options.keep_unused or jitted.keep_unused,
            compiler_options=(*options.compiler_options, *jitted.compiler_options),
        )
        self._programs = Programs(jitted.name, options)

    def run(self, jaxpr: Any, arguments: Sequence[Any]) -> by_jax.Ran:
        """Calls it."""
        lowered = self._lowered(jaxpr, list(map(committed_to, arguments)))
        placed = placed_arguments(lowered, arguments)
        executable = lowered.executable
        results = lowered.flat_results(executable(*placed.arrays), arguments)
        # What overwrites memory twice makes XLA:CPU crash, so there each call that donates is checked first.
        checked = self._jitted.donated and lowered.mesh.size > 1 and is_on_cpu(lowered)
        fast = not checked and by_dispatch(lowered, placed, arguments, results) is not None
        return by_jax.Ran(results, executable.compiled if fast else None, executable.captured)

    def lowered(self, jaxpr: Any, types: Sequence[tuple[Any, Any]], trees: tuple[Any, Any]) -> Lowered:
        """The chain for arguments of these types and shardings; arguments and results have these structures."""
        return self._lowered(jaxpr, [sharding for _, sharding in types]).structured(*trees)

    def _lowered(self, jaxpr: Any, places: Sequence[Any]) -> Lowered:
        in_tree = jax.tree.structure((tuple(0 for _ in places), {}))
        out_tree = jax.tree.structure([0] * len(jaxpr.out_avals))
        names, donated = self._jitted.argument_names, self._jitted.donated
        signature = Signature.of(jaxpr, jaxpr.in_avals, in_tree, out_tree, names, donated, places)
        return self._programs.lowered(jaxpr, signature, names)


def _device_sets(shardings: Sequence[Any]) -> list[Any]:
    """The devices of each sharding that names some; an open one does not, nor one over an abstract mesh."""
    abstract = jax.sharding.AbstractMesh
    return [s.device_set for s in shardings if s is not None and not isinstance(getattr(s, "mesh", None), abstract)]


def _or_none(shardings: Any) -> Any:
    return shardings if any(s is not None for s in shardings) else None


@weakly_cached
def _of_jaxpr(jaxpr: Any, jitted: by_jax.Jitted, partitioner: Partitioner) -> OfJaxpr:
    return OfJaxpr(jitted, partitioner.options_for(jitted.name))


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """Takes the place of XLA's partitioner; see ``core.jax_adapter_jit.Substitute``.

    With equal options one is equal to another, so that a second block finds the programs of the first.
    """

    options: Options  # of ``instead_of_jit``

    def options_for(self, name: str) -> Options:
        """The options for a function of this name: a plan counts for the function that it was made for."""
        plan = self.options.recorded
        if plan is None:
            return self.options
        _refuse_explicit(Mesh.of(self.options.mesh))
        if plan.name in ("", name):
            return self.options
        _log.info("gshard: %s is planned by its marks; the given plan is for %s", name, plan.name)
        return dataclasses.replace(self.options, recorded=None)

    def run(self, jaxpr: Any, jitted: by_jax.Jitted, arguments: Sequence[Any]) -> by_jax.Ran | None:
        """Calls a jitted function, partitioned."""
        shardings = [x.sharding for x in arguments if isinstance(x, jax.Array) and x.committed]
        found = self._partitioned(jaxpr, jitted, shardings)
        return None if found is None else found.run(jaxpr, arguments)

    def lower(
        self, jaxpr: Any, jitted: by_jax.Jitted, types: Sequence[tuple[Any, Any]], trees: tuple[Any, Any]
    ) -> Lowered | None:
        """Lowers one."""
        found = self._partitioned(jaxpr, jitted, [s for _, s in types if s is not None])
        return None if found is None else found.lowered(jaxpr, types, trees)

    def _partitioned(self, jaxpr: Any, jitted: by_jax.Jitted, committed: Sequence[Any]) -> OfJaxpr | None:
        """The partitioned function; None for one that says that it runs on other devices."""
        devices = set(Mesh.of(self.options.mesh).devices or ())
        said = _device_sets((*jitted.in_shardings, *jitted.out_shardings))
        if any(s != devices for s in said) or any(not s <= devices for s in _device_sets(committed)):
            _log.info("gshard: %s runs on devices that are not those of the mesh, and is left to JAX", jitted.name)
            return None
        if jitted.has_layouts:
            raise ShardingError(
                f"{jitted.name} was jitted with a layout in memory (jax.experimental.layout.Format).",
                user_line(),
                hint="Give a sharding alone, or call it outside of gshard.instead_of_jit.",
            )
        return _of_jaxpr(jaxpr, jitted, self)


def _refuse_explicit(mesh: Mesh) -> None:
    """Refuses a plan for a mesh with axes of type Explicit."""
    explicit = getattr(mesh.given, "explicit_axes", ())
    if explicit:
        raise PlanError(
            "JAX traces another program for arrays on a mesh with axes of type Explicit, and a plan is for one "
            "program.",
            user_line(),
            got=f"gshard.instead_of_jit(mesh, plan=...), Explicit axes: {', '.join(explicit)}",
            hint="Make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * n, or run the function by "
            "gshard.jit(f, mesh=mesh, plan=plan), which traces one program for all.",
        )


class InsteadOfJit(contextlib.ContextDecorator):
    """What ``instead_of_jit`` returns: a context manager that may be entered any number of times, and a decorator."""

    def __init__(self, options: Options):
        self._partitioner = Partitioner(options)
        self._entered = threading.local()

    def __enter__(self) -> None:
        block = by_jax.substituted(self._partitioner)
        block.__enter__()
        self._entered.__dict__.setdefault("blocks", []).append(block)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.blocks.pop().__exit__(*error)  # type: ignore[no-any-return]


@without_our_frames
def instead_of_jit(
    mesh: MeshLike = None,
    *,
    machine: str | Machine | None = None,
    strict: bool | float = False,
    collective_matmul: bool | int | CollectiveMatmul | None = None,
    memory_limit: int | str | None = None,
    search: bool | float = False,
    plan: Plan | SavedPlan | None = None,
    layout: Layout | None = None,
    keep_unused: bool = False,
    compiler_options: Any = None,
) -> InsteadOfJit:
    """In a block, gshard partitions every jitted function that you call, also those of libraries.

    This covers ``jax.jit``, ``flax.nnx.jit``, ``equinox.filter_jit``, ``haliax.named_jit`` and other libraries that
    call ``jax.jit``. A function may have been jitted before the block; what counts is where it (or its ``.lower``) is
    called.
    What it was jitted with (``in_shardings``, ``out_shardings``, ``donate_argnums``, ``static_argnums``,
    ``keep_unused``, ``compiler_options``) is kept; shardings count as marks. A block holds in the thread that enters
    it. Blocks may be nested. After the block all functions run as they did before it.

    JAX compiles as before: functions that a file of JAX defines (``jnp.ones``, ``jax.random.normal``; also where you
    jit one of them directly, or what ``checkify`` returns), operations and loops outside of any jitted function, and
    functions whose shardings or committed arguments name devices that are not in the mesh.

    Args:
        mesh: as for ``jit``; None takes the mesh that ``jax.set_mesh`` has set when a function is called.
        machine, strict, collective_matmul, memory_limit, search, layout, keep_unused, compiler_options: as for ``jit``.
        plan: a plan of ``gshard.search``, or a ``SavedPlan``. It counts for the functions that have the name of the
            function that it was made for; others are planned by their marks.

    Returns:
        a context manager, which is also a decorator of functions.

    Raises:
        MeshError: the mesh names devices that do not exist. MachineError: there is no such machine.
        PlanError: ``plan`` is no plan, or the mesh has axes of type Explicit. In the block: the errors of functions
            from ``jit``, and ShardingError for a function that was jitted with layouts in memory.

    >>> import jax.numpy as jnp
    >>> double = jax.jit(lambda x: 2 * x)
    >>> with instead_of_jit(mesh=1):
    ...     double(jnp.arange(3)).tolist()
    [0, 2, 4]
    """
    options = Options.of(
        mesh, strict, memory_limit, plan, layout, collective_matmul=collective_matmul, machine=machine, search=search,
        keep_unused=keep_unused, compiler_options=tuple((compiler_options or {}).items()),
    )  # fmt: skip
    if options.mesh is not None:
        options.target()  # errors of the mesh or the machine are raised at once
        if options.recorded is not None:
            _refuse_explicit(options.mesh)
    return InsteadOfJit(options)
