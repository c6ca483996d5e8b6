"""Traced, Lowered and Compiled: the stages of one function for one kind of arguments, as in ``jax.stages``."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from gshard.api.signature import arrays_of, refuse_twice, write_back
from gshard.api.target import Target
from gshard.core.errors import ArgumentError, ShardingError, warn_once
from gshard.core.jax_adapter import no_mesh_set, user_line
from gshard.core.jax_adapter_dispatch import (
    address_of,
    fast_path,
    input_layouts,
    kept_arguments,
    layout_of,
    names_devices,
    put_arguments,
)
from gshard.core.jax_adapter_references import is_reference_type
from gshard.core.jax_adapter_tracebacks import without_our_frames, without_our_frames_in_methods
from gshard.core.memory_kinds import is_host_kind
from gshard.core.mesh import Mesh
from gshard.core.phases import phase
from gshard.core.plan import Boundary, Plan
from gshard.core.program import Program
from gshard.core.spmd import SpmdProgram
from gshard.emit.compile import Executable, compiled_with_constants, named_sharding
from gshard.explanation.warnings import warn_of
from gshard.lowering.pipeline import Planned

# Checks that the arguments of a compiled program have the structure and types that it was compiled for.

_HINT = "Lower it for such arguments too, or call what gshard.jit returned."


def arguments_for(lowered: Lowered, args: Any, kwargs: Any) -> list[Any]:
    """The flat arguments of a call of a compiled program."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    name, names = lowered.program.name, lowered.program.names[len(lowered.program.captured) :]
    traced = next((type(x).__name__ for x in leaves if isinstance(x, jax.core.Tracer)), None)
    if traced is not None:
        raise ArgumentError(
            "Cannot apply JAX transformations to a function lowered and compiled for a particular signature. "
            f"Detected an argument of type {traced}.",
            user_line(),
            name,
            "Transform the function that gshard.jit returned.",
        )
    if tree != lowered.in_tree:
        raise ArgumentError(
            "Function compiled with input pytree does not match the input pytree it was called with.",
            user_line(),
            f"{name} was compiled for {lowered.in_tree} and is called with {tree}",
            _HINT,
        )
    wrong = []
    for i, (x, ours) in enumerate(zip(leaves, lowered.avals, strict=True)):
        theirs = jax.typeof(x)
        if _kind(theirs) != _kind(ours):
            wrong.append(f"Argument '{names[i]}' compiled with {ours.str_short()} and called with {theirs.str_short()}")
    if wrong:
        raise ArgumentError(
            f"Argument types differ from the types for which {name} was compiled. The mismatches are:\n"
            + "\n".join(wrong),
            user_line(),
            hint=_HINT,
        )
    return leaves


def _kind(aval: Any) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, is_reference_type(aval)


# Standalone: a compiled program that runs without gshard, so that it can be saved and loaded.


def standalone(lowered: Any) -> Any:
    """The ``jax.stages.Compiled`` of a program's flat arguments and flat results."""
    if names_devices(lowered.spmd.jaxpr):
        raise ArgumentError(
            f"{lowered.program.name} calls back to Python, which cannot be saved with a compiled program.",
            user_line(),
            hint="Leave out callbacks (jax.debug.print, pure_callback) in it.",
        )
    if lowered.spmd.in_orders or lowered.spmd.out_orders:
        return standalone(dataclasses.replace(lowered, target=dataclasses.replace(lowered.target, reorders=False)))
    executable, target = lowered.executable, lowered.target
    if not executable.captured:
        return executable.compiled
    options = dict(target.compiler_options) or None
    return compiled_with_constants(
        executable, lowered.donated, keep_unused=target.keep_unused, compiler_options=options
    )


_T = TypeVar("_T")


class _stage(functools.cached_property[_T]):
    """A cached property that is that of ``Lowered.flat``, where there is one: each is planned and compiled once."""

    if not TYPE_CHECKING:  # its type is that of a cached property

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return super().__get__(instance and (instance.flat or instance), owner)


def _of(path: str, doc: str | None = None) -> Any:
    """A property that reads an attribute of an attribute."""
    return property(operator.attrgetter(path), doc=doc)


class _Stage:
    """The arguments of a function, as of the stages of JAX. A stage has ``in_tree``, ``avals`` and ``donated``."""

    in_tree: Any
    avals: Any
    donated: Any

    @property
    def in_avals(self) -> Any:
        """JAX's types of the arguments, in their structure."""
        return jax.tree.unflatten(self.in_tree, self.avals)

    @property
    def args_info(self) -> Any:
        """Shape, dtype and whether it is donated for each argument, in their structure."""
        infos = [jax.stages.ArgInfo(a, i in self.donated) for i, a in enumerate(self.avals)]
        return jax.tree.unflatten(self.in_tree, infos)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The flat arguments that are donated."""
        return tuple(sorted(self.donated))


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lowered(_Stage):
    """One function made ready for one kind of arguments; each stage is made when it is first asked for.

    Attributes:
        program: the traced function.
        target: what it is partitioned for.
        in_tree: the structure of ``(positional, named)`` arguments.
        avals: JAX's types of the flat arguments.
        donated: arguments whose memory the results may take.
        closed_over: the references that the function closes over; the program takes them after the arguments.
        told: the kinds of warnings that the function had.
        moved: the committed arguments that calls have moved.
        flat: the same for flat arguments and results, whose stages are those of this one.
    """

    program: Program
    target: Target
    in_tree: Any
    avals: tuple[Any, ...]
    donated: frozenset[int]
    closed_over: tuple[Any, ...] = ()
    told: set[str] = dataclasses.field(default_factory=set)
    moved: set[int] = dataclasses.field(default_factory=set, init=False)
    flat: Lowered | None = dataclasses.field(default=None, init=False)  # ``dataclasses.replace`` leaves it out

    def structured(self, in_tree: Any, out_tree: Any) -> Lowered:
        """The same program with other structures of arguments and results, which is not planned before it is used."""
        made = dataclasses.replace(self, in_tree=in_tree, program=dataclasses.replace(self.program, out_tree=out_tree))
        object.__setattr__(made, "flat", self)
        return made

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.target.mesh

    @functools.cached_property
    def plan(self) -> Plan:
        """The sharding of every value, and why."""
        return self._planned.plan

    @_stage
    def _planned(self) -> Planned:
        donated = tuple(len(self.program.captured) + i for i in sorted(self.donated))
        with phase("planning", self.program.name, self.mesh.size):
            return self.target.planned(self.program, Boundary(donated))

    planning_seconds = _of("_planned.planning_seconds", "Processor time that planning took.")

    @_stage
    def spmd(self) -> SpmdProgram:
        """The one program that all devices run."""
        known = self._planned.cost
        with phase("partitioning", self.program.name, self.mesh.size):
            made = self.target.fitted(self.plan, self._all_kept, self.donated, known)
        self.target.check(self.plan, made)
        return made

    @_stage
    def _all_kept(self) -> SpmdProgram:
        return self.target.partitioned(self._planned)

    def marked(self, program: Program, by_bytes: bool = False) -> SpmdProgram:
        """What all devices would run if the program had other marks; ``by_bytes``, without a machine, sooner made."""
        target = self.target.by_marks
        if by_bytes:
            target = dataclasses.replace(target, machine=None, collective_matmul=None, faster=False)
        return dataclasses.replace(self, program=program, target=target).spmd

    @functools.cached_property
    def argument_shardings(self) -> tuple[Any, ...]:
        """Where each flat argument is expected, as JAX's ``NamedSharding``: what is there is not moved by a call."""
        first, spmd = len(self.program.captured), self.spmd
        return tuple(
            named_sharding(self.mesh.reordered(spmd.in_orders.get(i, self.mesh.order)), s, self.program.input_memory(i))
            for i, s in enumerate(spmd.in_shardings)
            if i >= first
        )

    @_stage
    def executable(self) -> Executable:
        """The program for XLA; call it with the flat arguments.

        Where the compiler needs more memory than was modelled, it recomputes more than ``spmd`` to keep to the limit.
        """
        made = self.target.compiled(self.spmd, self._all_kept, self.donated)
        warn_of(self.plan, self.told)
        return made

    def is_as(self, other: Lowered) -> bool:
        """Whether another one is planned in the same way for the same program, so that this one will do for both.

        Values and equations are compared by identity. That is enough: what planning writes in the place of equations
        belongs to the program, and is the same again where values are split in the same way (``planning.settled``).
        """
        ours, theirs = self.program, other.program
        alike = ours.block is theirs.block and self.in_tree == other.in_tree
        same = self.target == other.target and self.donated == other.donated
        same = same and ours.input_memories == theirs.input_memories and ours.output_memories == theirs.output_memories
        return alike and same and (ours.argument_marks == theirs.argument_marks or self.plan.runs_as(other.plan))

    @functools.cached_property
    def unread(self) -> frozenset[int]:
        """The flat arguments that XLA is not given, because nothing reads them."""
        first = len(self.program.captured)
        count = len(self.program.block.inputs) - first
        return frozenset(range(count)) - {i - first for i in kept_arguments(self.executable.compiled)}

    def flat_results(self, arrays: Sequence[Any], leaves: Sequence[Any] = ()) -> list[Any]:
        """The executable's results without those that are final values of references, which are written into these.

        ``leaves`` are the arguments of the call.
        """
        if self.program.references:
            first, count = len(self.program.captured), len(self.program.references)
            every = (*leaves, *self.closed_over)
            write_back([every[i - first] for i in self.program.references], arrays[len(arrays) - count :])
            arrays = arrays[: len(arrays) - count]
        return list(arrays)

    # As jax.stages.Lowered.

    def compile(
        self, compiler_options: Mapping[str, Any] | None = None, *, device_assignment: Sequence[Any] | None = None
    ) -> Compiled:
        """Compiles the program for the devices of the mesh.

        Args:
            compiler_options: XLA's, besides those that ``jit`` was given.
            device_assignment: not taken: the mesh names the devices.

        Raises:
            ArgumentError: ``device_assignment`` is given. MeshError: the mesh is abstract.
            MemoryLimitError: it does not fit in ``memory_limit``.
        """
        if device_assignment is not None:
            raise ArgumentError(
                "gshard's Lowered.compile takes no device_assignment: the mesh names the devices.",
                user_line(),
                f"device_assignment={device_assignment!r}"[:200],
                "Lower the function for a mesh of these devices: gshard.jit(f, mesh=devices).",
            )
        if compiler_options:
            options = (*self.target.compiler_options, *compiler_options.items())
            target = dataclasses.replace(self.target, compiler_options=options)
            return dataclasses.replace(self, target=target).compile()
        self.executable.compiled  # noqa: B018  what fails fails here
        return Compiled(self)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """StableHLO for all devices, as ``jax.stages.Lowered.as_text``; ``str`` has the plan too."""
        return str(self.executable.lowered.as_text(dialect, debug_info=debug_info))

    compiler_ir = _of("executable.lowered.compiler_ir", "The same as an object of the compiler.")
    cost_analysis = _of(
        "executable.lowered.cost_analysis",
        "XLA's estimate before compiling; ``gshard.explain(...).cost()`` counts loops and collectives too.",
    )

    @property
    def out_tree(self) -> Any:
        """The structure of the results."""
        return self.program.out_tree.children()[0] if self.program.references else self.program.out_tree

    @property
    def out_info(self) -> Any:
        """Shapes, dtypes and shardings of the results, in their structure."""
        orders, memory = self.spmd.out_orders, self.program.output_memory
        meshes = (self.mesh.reordered(orders.get(i, self.mesh.order)) for i in range(len(self.spmd.out_shardings)))
        found = zip(self.program.block.outputs, meshes, self.spmd.out_shardings, strict=True)
        infos = [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=named_sharding(mesh, s, memory(i)))
            for i, (v, mesh, s) in enumerate(found)
        ]
        del infos[len(infos) - len(self.program.references) :]
        return jax.tree.unflatten(self.out_tree, infos)

    def __str__(self) -> str:
        return f"{self.plan}\n\n{self.spmd}"

    def __repr__(self) -> str:
        return f"<lowered {self.program.name} for {self.mesh}: {len(self.program.block.equations)} equations>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compiled(_Stage):
    """A compiled function; call it with arguments of the kind that it was compiled for.

    Attributes:
        lowered: what it was compiled from.
    """

    lowered: Lowered

    @without_our_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on arrays; they are moved to where the program expects them."""
        leaves = arguments_for(self.lowered, args, kwargs)
        results = self.lowered.executable(*placed_arguments(self.lowered, leaves).arrays)
        return jax.tree.unflatten(self.out_tree, self.lowered.flat_results(results, leaves))

    _name = _of("lowered.program.name")
    _jax = _of("lowered.executable.compiled")  # JAX's program of the flat arguments

    def as_text(self) -> str:
        """The compiled HLO of one device."""
        return str(self._jax.as_text())

    cost_analysis = _of("_jax.cost_analysis", "XLA's FLOPs and bytes of one device; bodies of loops count once.")
    memory_analysis = _of("_jax.memory_analysis", "XLA's bytes of arguments, results and temporaries on one device.")
    runtime_executable = _of("_jax.runtime_executable", "XLA's own object.")
    in_tree = _of("lowered.in_tree", "The structure of ``(positional, named)`` arguments.")
    out_tree = _of("lowered.out_tree", "The structure of the results.")
    avals = _of("lowered.avals", "JAX's types of the flat arguments.")
    donated = _of("lowered.donated", "The flat arguments whose memory the results may take.")
    out_info = _of("lowered.out_info", "Shapes, dtypes and shardings of the results, in their structure.")

    @property
    def input_shardings(self) -> Any:
        """The shardings of ``(positional, named)`` arguments, in their structure."""
        return jax.tree.unflatten(self.in_tree, self.lowered.argument_shardings[: len(self.lowered.avals)])

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results, in their structure."""
        return jax.tree.map(lambda x: x.sharding, self.out_info)

    @property
    def input_formats(self) -> Any:
        """The shardings of ``(positional, named)`` arguments with their layouts in memory, in their structure."""
        layouts = [x.layout for x in jax.tree.leaves(self._jax.input_formats)][len(self.lowered.program.captured) :]
        found = zip(layouts, self.lowered.argument_shardings, strict=True)
        unread = self.lowered.unread
        formats = [Format() if i in unread else Format(layout, s) for i, (layout, s) in enumerate(found)]
        return jax.tree.unflatten(self.in_tree, formats)

    @property
    def output_formats(self) -> Any:
        """The shardings of the results with their layouts in memory, in their structure."""
        shardings, tree = jax.tree.flatten(self.output_shardings)
        layouts = [x.layout for x in jax.tree.leaves(self._jax.output_formats)]
        return jax.tree.unflatten(tree, [Format(x, s) for x, s in zip(layouts, shardings, strict=True)])

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling it."""
        return self(*args, **kwargs)

    # What ``jax.experimental.serialize_executable`` reads of a ``jax.stages.Compiled``.

    _no_kwargs = False

    @functools.cached_property
    def _standalone(self) -> Any:
        return standalone(self.lowered)

    _executable, _params = _of("_standalone._executable"), _of("_standalone._params")

    def __repr__(self) -> str:
        return f"<compiled {self._name} for {self.lowered.mesh}>"


# Traced: a traced function that is not planned yet.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """A traced function: the ``jax.stages.Traced`` of the function itself, which goes on to gshard's plan."""

    by_jax: jax.stages.Traced
    lowered: Callable[[], Lowered]  # goes on to the per-device program
    # gives what is said of each flat result of a pytree of shapes, None where nothing is
    out_shardings: Callable[[Any], Sequence[Any]]
    inside: Callable[[], Any]  # the same function traced as one equation of a program of JAX's

    def lower(self, **options: Any) -> Any:
        """Goes on to the per-device program; with JAX's own options, as ``jax.export`` has, to JAX's ``Lowered``."""
        given = any(x is not None for x in options.values())
        return self.inside().lower(**options) if given else self.lowered()

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, and the shardings that ``out_shardings`` names, in their structure."""
        shapes, tree = jax.tree.flatten(self.by_jax.out_info)
        said = self.out_shardings(jax.tree.unflatten(tree, shapes))
        shapes = [x.update(sharding=sharding) for x, sharding in zip(shapes, said, strict=True)]
        return jax.tree.unflatten(tree, shapes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the traced function, partitioned, for arguments without the static ones."""
        return self.inside()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.by_jax, name)


# Moves the arguments of a call into the buffers that its executable expects. JAX's dispatch in C++ takes the buffers of
# committed arrays on as many devices as they are, so other calls go through Python. Donated memory must belong to the
# call alone: a moved array is a copy, and none may be given twice.


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The arguments of one call."""

    arrays: list[Any]  # the flat arguments where the executable expects them; those that it does not read as they came
    by_dispatch: bool  # whether JAX's dispatch in C++ brings arguments that lie like these to the same place


def placed_arguments(lowered: Lowered, leaves: Sequence[Any]) -> Placed:
    """Moves flat arguments to where the program expects them; donated ones share no memory with anything else."""
    if lowered.program.references:
        leaves = [*leaves, *lowered.closed_over]
        refuse_twice(leaves, lowered.program.names[len(lowered.program.captured) :], lowered.program.name)
        leaves = arrays_of(leaves)
    lowered.executable.agreed  # noqa: B018  to move an array may take collectives as well
    donated, unread, targets = lowered.donated, lowered.unread, lowered.argument_shardings
    layouts = input_layouts(lowered.executable.compiled, len(lowered.program.captured))
    _check(lowered, leaves)
    arrays = list(leaves)
    moved = [i for i, x in enumerate(arrays) if i not in unread and not _lies_so(x, targets[i], layouts.get(i))]
    if not moved:
        return Placed(arrays, True)
    dispatched = not _tell(lowered, moved, arrays)
    with no_mesh_set():  # with one set JAX copies and moves no array of other devices, or of another order of them
        for i in moved:
            copied = i in donated and lowered.mesh.size > 1
            # C++ makes no copy of a donated array that lies on one of the devices already.
            dispatched = dispatched and not copied and not _is_taken_as_it_is(arrays[i], targets[i], layouts.get(i))
            copy = jnp.array if isinstance(arrays[i], jax.Array) else np.array
            arrays[i] = _in_memory_of(targets[i], copy(arrays[i], copy=True) if copied else arrays[i])
        for i, x in zip(moved, put_arguments([arrays[i] for i in moved], [targets[i] for i in moved]), strict=True):
            layout = layouts.get(i)
            arrays[i] = x if layout is None or layout_of(x) == layout else jax.device_put(x, Format(layout, targets[i]))
    return Placed(arrays, dispatched)


def _in_memory_of(target: Any, x: Any) -> Any:
    """An array in the kind of memory of a sharding: JAX changes the memory, or the order of devices, one at a time."""
    if not isinstance(x, jax.Array) or x.sharding.memory_kind == target.memory_kind:
        return x
    return jax.device_put(x, x.sharding.with_memory_kind(target.memory_kind))


def _tell(lowered: Lowered, moved: Sequence[int], arrays: Sequence[Any]) -> bool:
    """Warns of committed arguments that are moved again; whether others are, so that the next call comes here too."""
    names, targets = lowered.program.names[len(lowered.program.captured) :], lowered.argument_shardings
    committed = [i for i in moved if isinstance(arrays[i], jax.Array) and arrays[i].committed]
    again = [f"{names[i]}: from {arrays[i].sharding} to {targets[i]}" for i in committed if i in lowered.moved]
    hint = f"Place them once before, with jax.device_put. The call is at {user_line()}." if again else ""
    warn_once(lowered.program.name, lowered.told, "moves arguments in each call:", again, hint)
    is_first = not lowered.moved.issuperset(committed)
    lowered.moved.update(committed)
    return is_first


def by_dispatch(lowered: Lowered, placed: Placed, leaves: Sequence[Any], results: Sequence[Any]) -> Any:
    """What JAX's dispatch in C++ runs from now on for arguments that lie like these; None if each call needs Python."""
    executable = lowered.executable
    reordered = executable.spmd.in_orders or executable.spmd.out_orders
    if lowered.program.references or reordered or not placed.by_dispatch:
        return None
    return fast_path(executable.compiled, lowered.out_tree, results, executable.captured, len(leaves))


def is_on_cpu(lowered: Lowered) -> bool:
    """Whether a program runs on CPU devices, whose XLA may crash on arrays that were overwritten."""
    return any(d.platform == "cpu" for d in lowered.mesh.devices or ())


def captured_arrays(lowered: Lowered) -> list[Any]:
    """The captured arrays as they were placed, and those of the user's that share their memory."""
    placed = lowered.executable.captured
    own = zip(lowered.program.captured, placed, strict=True)
    return [*placed, *(x for x, copy in own if address_of(x) == address_of(copy))]


def _lies_so(x: Any, target: Any, layout: Any = None) -> bool:
    """Whether an array's buffers are the ones that are expected: devices, their order, memory, parts and layout."""
    if not isinstance(x, jax.Array):
        return False
    same = x.sharding == target or x.sharding.is_equivalent_to(target, x.ndim)
    return same and (layout is None or layout_of(x) == layout)


def _is_taken_as_it_is(x: Any, target: Any, layout: Any) -> bool:
    """Whether JAX's dispatch in C++ runs on the buffers of an array that lies otherwise than expected.

    What must be in the memory of the host is not left to it: on devices with one memory that would go unnoticed.
    """
    if is_host_kind(target.memory_kind):
        return True
    if not isinstance(x, jax.Array):
        return False
    if layout is not None and layout_of(x) != layout:
        return True
    return x.committed and len(x.sharding.addressable_devices) == len(target.addressable_devices)


def _check(lowered: Lowered, leaves: Sequence[Any]) -> None:
    captured, names = lowered.executable.captured, lowered.program.names
    for i, x in enumerate((*captured, *leaves), -len(captured)):
        if (i not in lowered.unread or i in lowered.donated) and getattr(x, "is_deleted", bool)():
            was, hint = (
                ("was given", "Use the earlier call's result") if i >= 0 else ("closes over", "Pass it as an argument")
            )
            raise ShardingError.like(
                RuntimeError(),
                f"{lowered.program.name} {was} an array that an earlier call has overwritten, as "
                f"{names[len(captured) + i]}.",
                user_line(),
                hint=f"{hint}, or do not donate it.",
            )
    at = {address_of(x): i for i, x in enumerate(captured, -len(captured))} if lowered.donated else {}
    for i, (x, target) in enumerate(zip(leaves, lowered.argument_shardings, strict=True)) if lowered.donated else ():
        first = at.setdefault(address_of(x), i) if _lies_so(x, target) else i
        if first != i and {first, i} & lowered.donated:
            raise ShardingError.like(
                RuntimeError(),
                f"{lowered.program.name} may overwrite an array that it was given twice, as "
                f"{names[len(captured) + first]} and {names[len(captured) + i]}.",
                user_line(),
                f"donated: {', '.join(names[len(captured) + k] for k in sorted(lowered.donated))}",
                "Give a copy (jnp.copy), or do not donate it.",
            )
