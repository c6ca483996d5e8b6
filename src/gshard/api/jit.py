"""jit: partitions a function of any marks, and runs it like ``jax.jit``: all stages, from call to results."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

import jax

from gshard.api.boundary import (
    mark_of_sharding,
    marked,
    marks_of_arguments,
    marks_of_in_shardings,
    memories,
    of_results,
    shardings_of_results,
)
from gshard.api.lowered import Lowered, Traced, by_dispatch, captured_arrays, is_on_cpu, placed_arguments
from gshard.api.marks import memories_of, told
from gshard.api.signature import (
    Signature,
    brought,
    committed_to,
    log_new_kind,
    type_to_trace,
    without_explicit_axes,
)
from gshard.api.target import Options, Target
from gshard.api.transformations import call, refuse_in_region, refuse_references
from gshard.api.wrapped import unwrapped
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_context import with_mesh_for_specs
from gshard.core.jax_adapter_dispatch import (
    Cache,
    FastFunction,
    emptied_by_jax,
    is_staging,
    may_crash,
    refused_by_dispatch,
    weakly_cached,
    without_constants,
)
from gshard.core.jax_adapter_jit import argument_names, given_to_jit, jaxpr_and_constants, jitted_like
from gshard.core.jax_adapter_references import array_type_of, references_in, type_of_reference
from gshard.core.jax_adapter_tracebacks import invalid, nan_found, without_jit, without_our_frames
from gshard.core.layout import Layout
from gshard.core.memory_kinds import is_in_host_space
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.paths import positional_names
from gshard.core.phases import collected_seldom, phase
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.device.machine import Machine
from gshard.language.registry import cleared_with_rules
from gshard.planning.collective_matmuls import CollectiveMatmul
from gshard.planning.saved_plan import SavedPlan
from gshard.remat.rematerialise import MemoryLimitError
from gshard.tracing.changed_objects import has_objects, with_kept_objects
from gshard.tracing.trace import leaked, name_of, program_of, traced_by

_log = logging.getLogger(__name__)


# Programs: those of one function, planned and compiled for each signature.


@weakly_cached
def _made_of(jaxpr: Any, options: Hashable) -> Cache:
    """The programs of a closed jaxpr. They live as long as it does: as long as JAX keeps the trace of the function."""
    return Cache(256)  # as many as combinations that JAX's dispatch keeps of a function


@weakly_cached
def _program(jaxpr: Any, name: str, signature: Signature, layout: Any, finite: bool) -> Program:
    with phase("rewriting", name):
        return program_of(jaxpr, signature.out_tree, name, signature.names, layout=layout, finite=finite)


class Programs:
    """The programs of one function with some options."""

    def __init__(self, name: str, options: Options):
        self.name, self.options = name, options
        self._last: Signature | None = None
        self._kinds = 1  # of arguments that it was planned for
        self._told: set[str] = set()

    def clear(self) -> None:
        """Forgets the kinds of calls. The programs go with JAX's trace of the function."""
        self._last, self._kinds = None, 1

    @with_tables
    def lowered(self, jaxpr: Any, signature: Signature, positional: Sequence[str]) -> Lowered:
        """The chain of a closed jaxpr for a signature; ``positional`` are the names of positional arguments."""
        target = self.options.target()
        cache = _made_of(jaxpr, self.options)
        made: Lowered = cache.get(
            (signature, target), lambda: self._lower(jaxpr, signature, positional, target, cache.values())
        )
        if target.recorded is not None:
            made.plan  # noqa: B018  the plan of another program is refused here
        self._last = signature
        return made

    def _lower(
        self, jaxpr: Any, signature: Signature, positional: Sequence[str], target: Target, known: Sequence[Lowered]
    ) -> Lowered:
        options, closed_over = self.options, references_in(jaxpr)
        types = [*map(array_type_of, signature.avals), *(array_type_of(type_of_reference(x)) for x in closed_over)]
        arrays = list(zip(types, signature.places, strict=True))
        whole = self._with_marked_results(jaxpr, signature)
        program = _program(whole, self.name, signature.anywhere, options.layout, options.finite)
        if self._last is not None:
            self._kinds += 1
            log_new_kind(self.name, signature, self._last, self._kinds)
        args, kwargs = signature.arguments()
        given = marks_of_in_shardings(options.in_shardings, self.name, positional, args, kwargs)
        marks = marks_of_arguments(program, arrays, target.mesh, given, target.takes_arguments_as_marks)
        of_memory = memories(program, arrays, (args, kwargs), options)
        program = target.with_kept_options(dataclasses.replace(program, argument_marks=marks, **of_memory))
        target = target.in_best_order(program)
        made = Lowered(
            program, target, signature.in_tree, signature.avals, signature.donated, tuple(closed_over), self._told,
        )  # fmt: skip
        # The state that comes back from a first call has shardings of its own and mostly the same plan: one executable.
        return next((other for other in known if other.is_as(made)), made)

    def _with_marked_results(self, jaxpr: Any, signature: Signature) -> Any:
        """The closed jaxpr with its results marked as ``out_shardings`` says."""
        if self.options.out_shardings is None:
            return jaxpr
        return marked(jaxpr, (), of_results(self.options, jaxpr, signature.out_tree))

    def equation(
        self, jaxpr: Any, signature: Signature, positional: Sequence[str], constants: Sequence[Any],
        leaves: Sequence[Any],
    ) -> list[Any]:  # fmt: skip
        """One equation of the program that is being traced, differentiated or mapped; see ``transformations``.

        ``constants`` are arrays of that program that the function closes over, the first inputs of its jaxpr.
        """
        options = self.options
        if options.memory_limit is not None:
            raise MemoryLimitError(
                f"{self.name} has a memory_limit, and a transformation around it decides what is kept.",
                user_line(),
                hint="Take the gradient inside: gshard.jit(jax.grad(f), mesh=..., memory_limit=...).",
            )
        refuse_in_region(self.name)
        whole, captured = without_constants(self._with_marked_results(jaxpr, signature))
        args, kwargs = signature.arguments()
        given = marks_of_in_shardings(options.in_shardings, self.name, positional, args, kwargs)
        target = options.target()
        pairs = zip(signature.avals, signature.places, strict=False)
        marks = [mark_of_sharding(sharding, len(a.shape), target.mesh) for a, sharding in pairs]
        marks[: len(given)] = [said or own for said, own in zip(given, marks, strict=False)]
        if any(mark is not None for mark in marks):
            whole = marked(whole, (*(None for _ in (*captured, *constants)), *marks), ())
        arrays = [*captured, *constants, *leaves]
        if not is_staging():
            refuse_references(arrays, self.name)
        try:
            return call(whole, target, arrays)
        except jax.errors.UnexpectedTracerError as error:
            raise leaked(error, self.name, user_line()) from None


def refuse_other_types(name: str, names: Sequence[str], in_avals: Sequence[Any], out_avals: Sequence[Any]) -> None:
    """Refuses arguments and results that are no arrays of known sizes: values of ``hijax``, tokens, symbolic sizes."""
    others = [f"result {i}" for i in range(len(out_avals))]
    for which, aval in zip((*names, *others), (*in_avals, *out_avals), strict=True):
        aval = array_type_of(aval)
        if aval.is_high or not hasattr(aval, "shape"):
            raise ArgumentError(
                f"{name} takes and returns arrays, and {which} is of another type.", user_line(), f"{which}: {aval}",
                "Pass the arrays that it is made of, and make the value inside the function.",
            )  # fmt: skip
        if not all(isinstance(size, int) for size in aval.shape):
            raise ArgumentError(
                f"{name} is partitioned for sizes that are known, and {which} has a symbolic dimension.",
                user_line(),
                aval.str_short(),
                "Give numbers, one program for each size; or leave the function to jax.jit.",
            )


# Jitted: what ``gshard.jit`` returns. It runs all stages, from a marked function to a program on all devices.


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one call, and what JAX has traced for them."""

    traced: jax.stages.Traced
    jaxpr: Any  # over ``constants`` and ``leaves``
    signature: Signature
    constants: list[Any]  # arrays of the program around that the function closes over
    leaves: list[Any]  # the flat arguments, without the static ones
    positional: list[str]  # the names of the positional arguments, without the static ones


class _Captured:
    """The captured arrays that programs in JAX's dispatch read, as long as JAX keeps these programs."""

    arrays: tuple[Any, ...] = ()

    def add(self, arrays: Iterable[Any]) -> None:
        self.arrays = tuple({id(x): x for x in (*self.arrays, *arrays)}.values())

    def cache_clear(self) -> None:
        """Called by ``jax.clear_caches``."""
        self.arrays = ()


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Jitted(Generic[P, R]):
    """What ``gshard.jit`` returns: call it like the function itself. Its attributes are those of ``jax.jit``'s.

    ``Jitted[[Params, Batch], Params]`` is the type of a partitioned step in annotations, with the types of its
    arguments and of its result; ``isinstance(f, gshard.stages.Jitted)`` is whether a function is partitioned by gshard.
    """

    def __init__(self, by_jax: Any, options: Options):
        given = given_to_jit(by_jax)
        assert given is not None
        functools.update_wrapper(self, given.f)
        self._by_jax = by_jax  # the same function from ``jax.jit``, which traces it
        self._f, (self._static_numbers, self._static_names) = given.f, given.static
        self._programs = Programs(name_of(given.f), options)
        # Weakly, so that a function is freed as soon as nothing needs it, and not when garbage is next collected.
        seen_first = weakref.WeakMethod(self._seen_first)
        miss = lambda *a, **k: seen_first()(*a, **k)  # type: ignore[misc]  # noqa: E731
        self._fast = FastFunction(given.f, miss, *given.static)
        cleared_with_rules(self._fast)
        self._call = self._fast.call
        self._donates = any(given.donated)
        self._captured = _Captured()
        emptied_by_jax(self._captured)
        self._needs_types = False  # whether JAX has refused to trace it without the types of Explicit axes
        self._may_crash = False  # no program is in JAX's dispatch yet
        if options.mesh is not None:
            options.target()  # errors of the mesh or the machine are raised at once

    @without_our_frames
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._may_crash and may_crash((args, kwargs, self._captured.arrays), self._donates):
            return self._seen_first(*args, **kwargs)[0]  # type: ignore[no-any-return]
        try:
            return self._call(*args, **kwargs)  # type: ignore[no-any-return]
        except (ValueError, RuntimeError) as error:  # what JAX's dispatch refuses by itself, without asking us
            if not refused_by_dispatch(error):
                raise
        return self._seen_first(*args, **kwargs)[0]  # type: ignore[no-any-return]

    @property
    def options(self) -> Options:
        """What ``jit`` was asked for."""
        return self._programs.options

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(self: Jitted[Concatenate[Any, Q], R], instance: object, owner: Any = None) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    # As of functions of ``jax.jit``: a copy would not find the programs, and another process has other devices.
    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises an ``ArgumentError`` (also a ``TypeError``): it holds devices and compiled programs."""
        raise ArgumentError.like(
            TypeError(),
            f"{self!r} cannot be pickled: it holds devices and compiled programs of this process.",
            user_line(),
            hint="Pickle the function itself, and call gshard.jit where it is loaded. To save a compiled program, use "
            "jax.experimental.serialize_executable; to save a program that other processes compile, use jax.export.",
        )

    def __repr__(self) -> str:
        where = "the mesh that is set" if self.options.mesh is None else str(self.options.mesh)
        return f"<gshard.jit of {getattr(self._f, '__qualname__', None) or name_of(self._f)} on {where}>"

    @without_our_frames
    def on(self, mesh: MeshLike) -> Jitted[P, R]:
        """The same function for another mesh."""
        return self._with(mesh=Mesh.of(mesh))

    def _with(self, **options: Any) -> Jitted[P, R]:
        return Jitted(self._by_jax, dataclasses.replace(self.options, **options))

    @without_our_frames
    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """The chain for these arguments (arrays or ``jax.ShapeDtypeStruct``): program, plan, spmd, executable."""
        return self._lowered(self.read(args, kwargs))

    def lower_for_search(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The chain whose program ``search`` plans: a program that is the same wherever the arguments are."""
        return self._lowered(self.read(args, kwargs, is_searched=True))

    @without_our_frames
    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """The function's jaxpr for these arguments, before anything is planned."""
        call, lowered = self.read(args, kwargs), functools.partial(self.lower, *args, **kwargs)
        as_equation = self._with(leaves_by_axes=True, has_places=True)

        def inside(*args: Any, **kwargs: Any) -> Any:
            made = as_equation.read(args, kwargs)
            signature = dataclasses.replace(made.signature, places=call.signature.places)
            return as_equation._equation(dataclasses.replace(made, signature=signature))

        def traced() -> Any:
            """The function as one equation of a program of JAX's, for arguments that lie as these do."""
            return jitted_like(self._by_jax, inside, self.options.keep_unused).trace(*args, **kwargs)

        return Traced(call.traced, lowered, functools.partial(shardings_of_results, self.options), traced)

    @without_our_frames
    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and ``out_shardings`` of the results; nothing is planned."""
        return self.trace(*args, **kwargs).out_info

    def _cache_size(self) -> int:
        """How many kinds of calls JAX's dispatch knows, as of ``jax.jit``."""
        return self._fast.size()

    def clear_cache(self) -> None:
        """Forgets all programs."""
        self._programs.clear()
        self._fast.clear()
        self._by_jax.clear_cache()

    @without_our_frames
    def _seen_first(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """A call that JAX's dispatch cannot answer: the results, and how it can from now on."""
        return *self._called(self.read(args, kwargs), args, kwargs), False

    def _called(self, call: _Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves = call.leaves
        if is_staging() or call.constants or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._equation(call), None
        self._refuse_shapes(call)
        lowered = self._lowered(call)
        placed = placed_arguments(lowered, leaves)
        try:
            results = lowered.executable(*placed.arrays)
        except Exception as error:
            if not nan_found(error):
                raise
            if lowered.program.references:  # they may have changed
                raise invalid(error, name_of(self._f)) from None
            return without_jit(lambda: self._f(*args, **kwargs), name_of(self._f)), None
        flat = lowered.flat_results(results, leaves)
        path = by_dispatch(lowered, placed, leaves, flat)
        if path is not None:
            # On one device XLA refuses such arrays; without donation only XLA:CPU crashes.
            self._may_crash |= lowered.mesh.size > 1 and (self._donates or is_on_cpu(lowered))
            self._captured.add(captured_arrays(lowered) if lowered.executable.captured else ())
        return jax.tree.unflatten(lowered.out_tree, flat), path

    def _equation(self, call: _Call) -> Any:
        """The results of a call that is one equation of a program that is being traced, differentiated or mapped."""
        made = self._programs.equation(call.jaxpr, call.signature, call.positional, call.constants, call.leaves)
        return jax.tree.unflatten(call.signature.out_tree, made)

    def _refuse_shapes(self, call: _Call) -> None:
        at = next((i for i, x in enumerate(call.leaves) if isinstance(x, jax.ShapeDtypeStruct)), None)
        if at is not None:
            raise ArgumentError(
                f"{name_of(self._f)} is called with a jax.ShapeDtypeStruct, which holds no values.",
                user_line(),
                f"{call.signature.names[at]}: {call.leaves[at]}",
                f"A call takes arrays. Shapes go to {name_of(self._f)}.lower(...), .eval_shape(...) or gshard.explain.",
            )

    def _lowered(self, call: _Call) -> Lowered:
        return self._programs.lowered(call.jaxpr, call.signature, call.positional)

    def read(self, args: Any, kwargs: Any, is_searched: bool = False) -> _Call:
        """What JAX traces for a call, and where the arguments lie.

        With the types of Explicit axes JAX traces another program for arguments that are on the mesh, such as a state
        that a first call returned. A plan is for one program, so a function that does not need the types is traced
        without them for ``search`` and for a plan that is given.
        """
        count = len(args)
        static = {i % count if -count <= i < 0 else i for i in self._static_numbers}
        arrays = [a for i, a in enumerate(args) if i not in static]
        named = {k: v for k, v in kwargs.items() if k not in self._static_names}
        leaves, tree = jax.tree.flatten((tuple(arrays), named))
        shapes = list(map(type_to_trace, leaves))
        in_shardings = self.options.in_shardings
        if in_shardings is not None and any(isinstance(x, jax.core.ShapedArray) for x in shapes):  # in host memory
            kinds = memories_of(in_shardings, jax.tree.unflatten(tree, shapes))
            shapes = [x if k is None else brought(x, is_in_host_space(k)) for k, x in zip(kinds, shapes, strict=True)]

        def trace(shapes: list[Any]) -> jax.stages.Traced:
            positional, named = jax.tree.unflatten(tree, shapes)
            rest = iter(positional)
            full = [a if i in static else next(rest) for i, a in enumerate(args)]
            by_jax = self._with_kept_objects if has_objects(tree) else self._by_jax
            mesh = None if self.options.mesh is None else self.options.mesh.user_jax_mesh
            with collected_seldom():  # JAX logs how long it takes
                return with_mesh_for_specs(lambda: traced_by(by_jax, *full, **{**kwargs, **named}), mesh)

        untyped = list(map(without_explicit_axes, shapes))
        try:
            traced = trace(untyped if self._is_traced_without_types(is_searched) else shapes)
        except Exception as error:  # of any kind: it comes from the user's function
            if untyped == shapes or not self._is_traced_without_types(is_searched):
                raise
            _log.debug("gshard: %s is traced with the types of its arguments: %s", name_of(self._f), error)
            traced = trace(shapes)
            self._needs_types = True
        jaxpr, constants = jaxpr_and_constants(traced)
        names = argument_names(traced.jaxpr)[len(constants) :]
        refuse_other_types(name_of(self._f), names, traced.jaxpr.in_avals[len(constants) :], traced.jaxpr.out_avals)
        donated = traced.donate_argnums if self._donates else ()
        places = [committed_to(x) for x in leaves]
        signature = Signature.of(
            jaxpr, jaxpr.in_avals[len(constants) :], tree, jax.tree.structure(traced.out_info), names, donated, places
        )
        called = positional_names(self._f, len(args))
        positional = [name for i, name in enumerate(called) if i not in static]
        return _Call(traced, jaxpr, signature, constants, leaves, positional)

    def _is_traced_without_types(self, is_searched: bool) -> bool:
        return (is_searched or self.options.recorded is not None) and not self._needs_types

    @functools.cached_property
    def _with_kept_objects(self) -> Any:
        """The function, refused where it would lose what it changes in an object."""
        return jitted_like(self._by_jax, with_kept_objects(self._f, name_of(self._f)))


class JitOptions(TypedDict, total=False):
    """The options of ``jit`` besides the function and the mesh, for type checkers; ``jit`` describes them."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, Any] | None
    device: Any
    backend: str | None
    machine: str | Machine | None
    strict: bool | float
    collective_matmul: bool | int | CollectiveMatmul | None
    memory_limit: int | str | None
    plan: Plan | SavedPlan | None
    search: bool | float
    layout: Layout | None
    finite: bool


class Decorator(Protocol):
    """What ``jit`` without a function returns: makes a partitioned function of each function that it is called with."""

    def __call__(self, f: Callable[P, R], /) -> Jitted[P, R]:
        """Partitions a function."""


@overload
def jit(f: Callable[P, R], mesh: MeshLike = None, **options: Unpack[JitOptions]) -> Jitted[P, R]: ...


@overload
def jit(f: None = None, mesh: MeshLike = None, **options: Unpack[JitOptions]) -> Decorator: ...


@without_our_frames
def jit(
    f: Callable[..., Any] | None = None,
    mesh: MeshLike = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    machine: str | Machine | None = None,
    strict: bool | float = False,
    collective_matmul: bool | int | CollectiveMatmul | None = None,
    memory_limit: int | str | None = None,
    plan: Plan | SavedPlan | None = None,
    search: bool | float = False,
    layout: Layout | None = None,
    finite: bool = False,
    **of_jax: Any,
) -> Any:
    """Partitions a function over a mesh; used like ``jax.jit``, as a call or a decorator, on functions and methods.

    Args:
        f: a function of pytrees of arrays, written for one device, with marks. What ``jax.jit`` returned counts with
            all that ``jax.jit`` was given.
        mesh: a ``jax.sharding.Mesh``, a number of devices, a list of devices, or ``{"data": 4, "model": 2}``; None
            takes that of the shardings that ``jax.jit`` was given, or the one that is set when the function is called.
        in_shardings: for the positional arguments (that are not static) a pytree prefix of ``PartitionSpec``,
            ``NamedSharding`` or None (not said); counts as marks on them. Others may not be given by name then.
        out_shardings: the same for the results.
        machine: what the devices are, such as ``"h100:1x8"``; None takes what the mesh's devices are. In the plan a
            call takes least time there, and loops gather a round before they need it where the compiler of such
            machines hides that (TPU v5e). For CPUs, abstract meshes, and devices that there is no model of, None takes
            the plan that sends least, and computes no product twice to send less.
        strict: True refuses operations without a rule instead of gathering their operands, a layout with rows for
            nothing, and what the function says and gshard does not keep (``explain(...).lists["dropped"]``). A number
            of bytes also refuses a program in which each device sends more than that in one call, and names the lines
            that do.
        collective_matmul: which contractions run part by part instead of after a gather of an operand or before a
            scatter of the result (figure 4c of the paper): True takes those that send no more bytes so, a number those
            for which a device would hold more bytes than that, and ``CollectiveMatmul`` says it in detail. None
            takes those that make a call faster on ``machine``, where its compiler is known to send while it computes
            (TPU from v4 on), and without a machine none; False takes none.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``. What would not fit is recomputed
            when it is needed; ``gshard.explain`` says what, and the share of FLOPs.
        plan: what ``gshard.search`` found (``found.plan``, or ``SavedPlan.load`` of what was saved): exactly this is
            partitioned, whatever sharding arguments come with. Another program, or another mesh, is refused.
        search: whether to search for the plan, on ``machine`` and within ``memory_limit``, when a call of a new kind
            comes, instead of propagating marks; a number gives it so many seconds. Marks in the function and
            ``in_shardings`` are kept; arguments are moved to where the plan wants them.
        layout: what names of dimensions (``gshard.name``) mean; without one they mean nothing.
        finite: True states that no part of a sum of floats overflows, underflows or is not finite, nor what such parts
            are multiplied or divided by. Sums may then stay in parts through products too (``docs/numerics.md``).
        of_jax: the other options of ``jax.jit``: ``static_argnums``, ``static_argnames``, ``donate_argnums``,
            ``donate_argnames``, ``keep_unused``, ``compiler_options`` and ``inline``, which changes nothing, since a
            partitioned function is one equation of another program. ``device`` and ``backend`` are refused.

    Returns:
        a ``Jitted`` with the same results; ``.lower(*args)`` gives the chain behind it, ``.trace``, ``.eval_shape``,
        ``.clear_cache`` and ``.lower(*args).compile()`` are as of ``jax.jit``.

    Raises:
        MeshError: the mesh names devices that do not exist. ArgumentError: ``f`` is no function, or has no such
            argument. When called: ShardingError, TraceError, PlanError, ArgumentError, MemoryLimitError (the program
            does not fit, whatever is recomputed).

    >>> import jax.numpy as jnp
    >>> from gshard.api.marks import split
    >>> double = jit(lambda x: 2 * split(x, 0, 1), mesh=1)
    >>> double(jnp.arange(3)).tolist()
    [0, 2, 4]
    """
    asked = dict(locals())
    if f is None:
        del asked["f"], asked["of_jax"]
        return functools.partial(jit, **asked, **of_jax)
    if not callable(f) or isinstance(f, jax.sharding.Mesh):  # a mesh can be called: as a decorator
        what = f"a mesh: {Mesh.of(f)}" if isinstance(f, jax.sharding.Mesh) else told(f)
        hint = "Write gshard.jit(f, mesh=8), or @gshard.jit(mesh=8) above a function."
        raise ArgumentError(f"Expected a function, got {what}.", user_line(), hint=hint)
    by_jax, read, own_mesh = unwrapped(f, {"in_shardings": in_shardings, "out_shardings": out_shardings}, of_jax)
    if mesh is None:
        inner = by_jax.__wrapped__
        mesh = inner.options.mesh if isinstance(inner, Jitted) else own_mesh
    options = Options.of(
        mesh, strict, memory_limit, plan, layout, collective_matmul=collective_matmul, machine=machine,
        search=search, finite=bool(finite), **read,
    )  # fmt: skip
    return Jitted(by_jax, options)
