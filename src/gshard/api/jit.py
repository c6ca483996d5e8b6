"""jit: partitions a function of any marks, and runs it like ``jax.jit``: all stages, from call to results."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

import jax

from gshard.api.boundary import (
    marks_of_arguments,
    marks_of_in_shardings,
    memories,
    shardings_of_results,
    with_marked_arguments,
    with_marked_results,
)
from gshard.api.lowered import Lowered, Traced, by_dispatch, captured_arrays, is_on_cpu, placed_arguments
from gshard.api.names import names_of_arguments, with_named_arguments, with_names_of_arguments
from gshard.api.signature import Parameters, Signature, freed, has_fixed, log_new_kind
from gshard.api.specs import told
from gshard.api.target import Options, Target
from gshard.api.transformations import call, refuse_references, target_inside
from gshard.api.wrapped import refuse_device, unwrapped
from gshard.core.errors import ArgumentError, ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_context import with_mesh_for_specs
from gshard.core.jax_adapter_dispatch import (
    FastFunction,
    SharedCaches,
    emptied_by_jax,
    forget_traces,
    is_staging,
    may_crash,
    refuse_what_is_no_function,
    refused_by_dispatch,
    without_constants,
)
from gshard.core.jax_adapter_references import references_in
from gshard.core.jax_adapter_tracebacks import invalid, nan_found, without_jit, without_our_frames
from gshard.core.keywords import keywords
from gshard.core.layout import Layout
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.paths import positional_names
from gshard.core.phases import phase
from gshard.core.plan import Plan
from gshard.core.planning_tables import Tables, with_tables
from gshard.core.program import Program
from gshard.core.uneven import UnevenArray
from gshard.device.machine import Machine
from gshard.language.registry import cleared_with_rules
from gshard.planning.collective_matmuls import CollectiveMatmul
from gshard.planning.saved_plan import SavedPlan
from gshard.remat.rematerialise import MemoryLimitError
from gshard.tracing.by_jax import closed_of, leaked, name_of
from gshard.tracing.trace import program_of

# Jitted: what ``gshard.jit`` returns. It runs all stages, from a marked function to a program on all devices.

_log = logging.getLogger(__name__)
_PLANS = 4  # new kinds of calls for which a function keeps what planning computed on its way
_CACHES = SharedCaches(256)  # programs of each function, as many as combinations that JAX's dispatch keeps of it


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

    def __init__(self, f: Callable[P, R], parameters: Parameters, options: Options):
        functools.update_wrapper(self, f)
        self._f, self._options = f, options
        self._parameters = dataclasses.replace(parameters, in_shardings=options.in_shardings)
        self._made, self._traced = _CACHES.of(f, (parameters.told, options.key))
        self._tables = Tables(_PLANS)
        self._seen_last: Signature | None = None
        self._told: set[str] = set()
        self._kinds = 1  # of arguments that it was planned for
        emptied_by_jax(self._tables)
        numbers, names = parameters.static_numbers, parameters.static_names
        # Weakly, so that a function is freed as soon as nothing needs it, and not when garbage is next collected.
        seen_first = weakref.WeakMethod(self._seen_first)
        self._fast = FastFunction(parameters.plain, lambda *a, **k: seen_first()(*a, **k), numbers, names)  # type: ignore[misc]
        cleared_with_rules(self._fast)
        self._call = self._fast.call
        self._donates = bool(parameters.donated_numbers or parameters.donated_names)
        self._captured = _Captured()
        emptied_by_jax(self._captured)
        self._may_crash = False  # no program is in JAX's dispatch yet
        self._fixes = parameters.static_leaves
        if options.mesh is not None:
            options.target()  # errors of the mesh or the machine are raised at once

    @without_our_frames
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._fixes:
            return freed(self._dispatched(*self._parameters.fixed(args, kwargs)))  # type: ignore[no-any-return]
        return self._dispatched(args, kwargs)  # type: ignore[no-any-return]

    def _dispatched(self, args: Any, kwargs: Any) -> Any:
        if self._may_crash and may_crash((args, kwargs, self._captured.arrays), self._donates):
            return self._seen_first(*args, **kwargs)[0]
        try:
            return self._call(*args, **kwargs)
        except (ValueError, RuntimeError) as error:  # what JAX's dispatch refuses by itself, without asking us
            if not refused_by_dispatch(error):
                raise
        return self._seen_first(*args, **kwargs)[0]

    @property
    def options(self) -> Options:
        """What ``jit`` was asked for."""
        return self._options

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
        where = "the mesh that is set" if self._options.mesh is None else str(self._options.mesh)
        return f"<gshard.jit of {getattr(self._f, '__qualname__', None) or name_of(self._f)} on {where}>"

    @without_our_frames
    def on(self, mesh: MeshLike) -> Jitted[P, R]:
        """The same function for another mesh."""
        return self._with(mesh=Mesh.of(mesh))

    def planned_for(self, machine: str | Machine) -> Jitted[P, R]:
        """The same function for another machine."""
        return self._with(machine=machine)

    def under(self, layout: Layout | None) -> Jitted[P, R]:
        """The same function under another layout, its arguments without names."""
        return self._with(layout=layout, names=None)

    def running(
        self, plan: Plan | SavedPlan, mesh: MeshLike, machine: str | Machine | None, memory_limit: int | None
    ) -> Jitted[P, R]:
        """The same function with a plan; arguments as of ``jit``."""
        recorded = SavedPlan.checked(plan)
        return self._with(mesh=Mesh.of(mesh), machine=machine, memory_limit=memory_limit, recorded=recorded)

    def _with(self, **options: Any) -> Jitted[P, R]:
        return Jitted(self._f, self._parameters, dataclasses.replace(self._options, **options))

    @without_our_frames
    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """The chain for these arguments (arrays or ``jax.ShapeDtypeStruct``): program, plan, spmd, executable."""
        signature, _ = self._parameters.signature(*self._on_this_mesh(args, kwargs))
        return self._lowered(signature, self._options.target())

    def lower_for_search(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The chain whose program ``search`` plans: a program that is the same wherever the arguments are."""
        signature, _ = self._parameters.signature(*self._on_this_mesh(args, kwargs))
        return self._lowered(self._as_searched(signature), self._options.target())

    @without_our_frames
    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """The function's jaxpr for these arguments, before anything is planned."""
        args, kwargs = self._on_this_mesh(args, kwargs)
        signature, _ = self._parameters.signature(args, kwargs)
        (jaxpr, out_tree), donated = self._closed(signature), self._parameters.donated(signature)
        lowered, said = partial(self.lower, *args, **kwargs), partial(shardings_of_results, self._options)
        by_axes = partial(self._with, leaves_by_axes=True)
        by_jax = partial(self._parameters.traced_by_jax, by_axes, self._options.keep_unused, args, kwargs)
        return Traced(jaxpr, signature.tree, out_tree, name_of(self._f), donated, lowered, said, by_jax)

    @without_our_frames
    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and ``out_shardings`` of the results; nothing is planned."""
        return self.trace(*args, **kwargs).out_info

    def _cache_size(self) -> int:
        """How many kinds of calls JAX's dispatch knows, as of ``jax.jit``."""
        return self._fast.size()

    def clear_cache(self) -> None:
        """Forgets all programs."""
        for cache in (self._made, self._traced, self._tables):
            cache.cache_clear()
        self._seen_last, self._kinds = None, 1
        self._fast.clear()
        forget_traces(self._f)

    @without_our_frames
    def _seen_first(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """A call that JAX's dispatch cannot answer: the results, and how it can from now on."""
        with self._tables.for_one_plan():
            return self._called(args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
        signature, leaves = self._parameters.signature(*self._on_this_mesh(args, kwargs))
        if is_staging() or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._as_equation(signature, leaves), None, False
        self._refuse_shapes(signature, leaves)
        if any(isinstance(x, jax.core.Tracer) for x in without_constants(self._closed(signature)[0])[1]):
            return self._as_equation(signature, leaves), None, False
        lowered = self._lowered(signature, self._options.target())
        placed = placed_arguments(lowered, leaves)
        try:
            results = lowered.executable(*placed.arrays)
        except Exception as error:
            if not nan_found(error):
                raise
            if lowered.program.references:  # they may have changed
                raise invalid(error, name_of(self._f)) from None
            return without_jit(lambda: self._parameters.plain(*args, **kwargs), name_of(self._f)), None, False
        flat = lowered.flat_results(results, leaves)
        path = by_dispatch(lowered, placed, leaves, flat)
        if path is not None:
            # On one device XLA refuses such arrays; without donation only XLA:CPU crashes.
            self._may_crash |= lowered.mesh.size > 1 and (self._donates or is_on_cpu(lowered))
            self._captured.add(captured_arrays(lowered) if lowered.executable.captured else ())
        results = jax.tree.unflatten(lowered.out_tree, flat)
        if has_fixed(lowered.out_tree) and not self._fixes:
            return freed(results), None, False
        return results, path, False

    def _refuse_shapes(self, signature: Signature, leaves: Sequence[Any]) -> None:
        at = next((i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)), None)
        if at is not None:
            name = signature.names(self._parameters.with_statics(signature.statics))[at]
            raise ArgumentError(
                f"{name_of(self._f)} is called with a jax.ShapeDtypeStruct, which holds no values.",
                user_line(),
                f"{name}: {leaves[at]}",
                f"A call takes arrays. Shapes go to {name_of(self._f)}.lower(...), .eval_shape(...) or gshard.explain.",
            )

    def _on_this_mesh(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What is in padded parts on other devices is made whole; static leaves become parts of the structure."""
        args, kwargs = self._parameters.fixed(args, kwargs)

        def moved(x: Any) -> Any:
            if not isinstance(x, UnevenArray) or (self._options.mesh is not None and x.mesh == self._options.mesh):
                return x
            return x.whole()

        if not any(isinstance(x, UnevenArray) for x in jax.tree.leaves((args, kwargs))):
            return args, kwargs
        return jax.tree.map(moved, (args, kwargs))  # type: ignore[no-any-return]

    def _as_equation(self, signature: Signature, leaves: Sequence[Any]) -> Any:
        """One equation of the program that is being traced, differentiated or mapped; see ``transformations``."""
        if self._options.memory_limit is not None:
            raise MemoryLimitError(
                f"{name_of(self._f)} has a memory_limit, and a transformation around it decides what is kept.",
                user_line(),
                hint="Take the gradient inside: gshard.jit(jax.grad(f), mesh=..., memory_limit=...).",
            )
        whole, out_tree = self._closed(signature, marked=True)
        jaxpr, constants = without_constants(whole)
        target = target_inside(self._options.target(), jaxpr, name_of(self._f))
        leaves = [*constants, *(x.whole() if isinstance(x, UnevenArray) else x for x in leaves)]
        if not is_staging():
            refuse_references(leaves, name_of(self._f))
        try:
            results = call(jaxpr, target, leaves)
        except jax.errors.UnexpectedTracerError as error:
            raise leaked(error, name_of(self._f), user_line()) from None
        return jax.tree.unflatten(out_tree, results)

    def _closed(self, signature: Signature, marked: bool = False) -> tuple[Any, Any]:
        """The function's jaxpr for a kind of arguments; ``marked`` with its ``in_shardings`` on the arguments."""

        def trace(tokens: bool) -> tuple[Any, Any]:
            f = self._parameters.to_trace(signature, tokens=tokens)
            if marked and self._options.in_shardings is not None:
                f = with_marked_arguments(f, self._options.in_shardings)
            if marked and self._options.names is not None:
                f = with_named_arguments(f, self._options.names)
            if self._options.out_shardings is not None:
                f = with_marked_results(f, self._options.out_shardings, even=not self._options.keep_uneven)
            args, kwargs = signature.arguments()
            with phase("tracing", name_of(self._f)):
                mesh = None if self._options.mesh is None else self._options.mesh.user_jax_mesh
                made = with_mesh_for_specs(lambda: closed_of(f, *args, **kwargs), mesh)
            return made if tokens or all(hasattr(a, "shape") for a in made[0].out_avals) else trace(True)

        key = signature.traced, marked
        found: tuple[Any, Any] = self._traced.get(key, lambda: trace(has_fixed(signature.tree)))
        if any(isinstance(x, jax.core.Tracer) for x in without_constants(found[0])[1]):
            self._traced.forget(key)  # what the function closed over belongs to the transformation of now
        return found

    @with_tables
    def _lowered(self, signature: Signature, target: Target) -> Lowered:
        if target.recorded is not None:
            signature = self._as_searched(signature)
        signature = signature.closing_over(references_in(self._closed(signature)[0]))
        made: Lowered = self._made.get((signature, target), lambda: self._lower(signature, target))
        if target.recorded is not None:
            made.plan  # noqa: B018  the plan of another program is refused here
        self._seen_last = signature
        return made

    def _as_searched(self, signature: Signature) -> Signature:
        """A kind of arguments without the types of Explicit axes.

        With these types JAX traces another program for arguments that are on the mesh, such as a state that a first
        call returned. A plan is for one program. A function that needs the types is traced with them.
        """
        untyped = signature.without_types()
        if untyped == signature or self._traced.get((untyped.traced, "can be traced"), lambda: self._traces(untyped)):
            return untyped
        return signature

    def _traces(self, signature: Signature) -> bool:
        """Whether the function can be traced for a kind of arguments."""
        try:
            self._closed(signature)
        except Exception as error:  # of any kind: it comes from the user's function
            _log.debug("gshard: %s is traced with the types of its arguments: %s", name_of(self._f), error)
            return False
        return True

    def _lower(self, signature: Signature, target: Target) -> Lowered:
        program = self._traced.get((signature.traced, "program"), lambda: self._program(signature))
        f = self._parameters.with_statics(signature.statics)
        if self._seen_last is not None:
            self._kinds += 1
            log_new_kind(name_of(self._f), lambda: signature.names(f), signature, self._seen_last, self._kinds)
        given = marks_of_in_shardings(self._options.in_shardings, f, *signature.arguments())
        kept = target.takes_arguments_as_marks
        marks = marks_of_arguments(program, [x.array_type for x in signature.every], target.mesh, given, kept)
        program = dataclasses.replace(program, argument_marks=marks, **memories(program, signature, self._options))
        program = target.with_kept_options(program)
        if self._options.names is not None:
            args, kwargs = signature.arguments()
            said = names_of_arguments(positional_names(f, len(args)), self._options.names, args, kwargs)
            program = with_names_of_arguments(program, said, given)
        first = len(program.captured)
        padded = {first + i: x.partitioning for i, x in enumerate(signature.leaves) if x.partitioning is not None}
        donated, closed_over = self._parameters.donated(signature), tuple(references_in(self._closed(signature)[0]))
        target = target.in_best_order(program)
        made = Lowered(program, target, signature.tree, signature.avals, donated, padded, closed_over, self._told)
        # The state that comes back from a first call has shardings of its own and mostly the same plan: one executable.
        known = next((known for known in self._made.values() if known.is_as(made)), made)
        if known is not made:
            self._tables.cache_clear()
        return known

    def _program(self, signature: Signature) -> Program:
        (jaxpr, out_tree), asked = self._closed(signature), self._options
        names = signature.names(self._parameters.with_statics(signature.statics))
        with phase("rewriting", name_of(self._f)):
            return program_of(jaxpr, out_tree, name_of(self._f), names, layout=asked.layout, finite=asked.finite)


class JitOptions(TypedDict, total=False):
    """The options of ``jit`` besides the function and the mesh, for type checkers; ``jit`` describes them."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    static_leaves: bool
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, Any] | None
    device: Any
    backend: str | None
    machine: str | Machine | None
    strict: bool | float
    uneven: Literal["gather", "keep"]
    collective_matmul: bool | int | CollectiveMatmul | None
    memory_limit: int | str | None
    plan: Plan | SavedPlan | None
    search: bool | float
    layout: Layout | None
    names: Any
    finite: bool


class Decorator(Protocol):
    """What ``jit`` without a function returns: makes a partitioned function of each function that it is called with."""

    def __call__(self, f: Callable[P, R], /) -> Jitted[P, R]:
        """Partitions a function."""


@overload
def jit(f: Callable[P, R], mesh: MeshLike = None, **options: Unpack[JitOptions]) -> Jitted[P, R]: ...


@overload
def jit(f: None = None, mesh: MeshLike = None, **options: Unpack[JitOptions]) -> Decorator: ...


@keywords()
def jit(
    f: Callable[..., Any] | None = None,
    mesh: MeshLike = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_leaves: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    device: Any = None,
    backend: str | None = None,
    machine: str | Machine | None = None,
    strict: bool | float = False,
    uneven: Literal["gather", "keep"] = "gather",
    collective_matmul: bool | int | CollectiveMatmul | None = None,
    memory_limit: int | str | None = None,
    plan: Plan | SavedPlan | None = None,
    search: bool | float = False,
    layout: Layout | None = None,
    names: Any = None,
    finite: bool = False,
) -> Any:
    """Partitions a function over a mesh; used like ``jax.jit``, as a call or a decorator, on functions and methods.

    Args:
        f: a function of pytrees of arrays, written for one device, with marks. What ``jax.jit`` returned counts with
            all that ``jax.jit`` was given.
        mesh: a ``jax.sharding.Mesh``, a number of devices, a list of devices, or ``{"data": 4, "model": 2}``; None
            takes that of the shardings that ``jax.jit`` was given, or the one that is set when the function is called.
        static_argnums, static_argnames: arguments that are plain (hashable) values, not arrays.
        donate_argnums, donate_argnames: arguments whose memory the results may take.
        static_leaves: whether what is no array inside of arguments (activation functions, numbers of Python) is static
            too, a new program for each value; results may hold such leaves as well. As ``eqx.filter_jit`` does.
        in_shardings: for the positional arguments (that are not static) a pytree prefix of ``PartitionSpec``,
            ``NamedSharding`` or None (not said); counts as marks on them. Others may not be given by name then.
        out_shardings: the same for the results.
        keep_unused: whether arguments that nothing reads are moved to the devices all the same.
        inline: taken for ``jax.jit``'s sake; inside another program a partitioned function is one equation in any case.
        compiler_options: XLA's, as for ``jax.jit``.
        device, backend: not taken: the mesh names the devices.
        machine: what the devices are, such as ``"h100:1x8"``; None takes what the mesh's devices are. In the plan a
            call takes least time there, and loops gather a round before they need it where the compiler of such
            machines hides that (TPU v5e). For CPUs, abstract meshes, and devices that there is no model of, None takes
            the plan that sends least, and computes no product twice to send less.
        strict: True refuses operations without a rule instead of gathering their operands, a layout with rows for
            nothing, and what the function says and gshard does not keep (``explain(...).lists["dropped"]``). A number
            of bytes also refuses a program in which each device sends more than that in one call, and names the lines
            that do.
        uneven: what becomes of results that are split in a dimension which does not divide: ``"gather"`` makes it
            whole, since JAX has no such arrays, or splits an unmarked result along another one if that sends
            less; ``"keep"`` returns an ``UnevenArray``, which the next call takes without moving it.
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
        layout: what names of dimensions (``gshard.name``, ``names``) mean; without one they mean nothing.
        names: what the dimensions of arguments are called: a dictionary from paths or patterns of them
            (``"params/**/w1": "embed hidden"``), or a pytree prefix of names for the positional arguments.
        finite: True states that no part of a sum of floats overflows, underflows or is not finite, nor what such parts
            are multiplied or divided by. Sums may then stay in parts through products too (``docs/numerics.md``).

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
        del asked["f"]
        return functools.partial(jit, **asked)
    try:
        refuse_what_is_no_function(f)
        if isinstance(f, jax.sharding.Mesh):  # it can be called: as a decorator
            raise TypeError(f"Expected a function, got a mesh: {Mesh.of(f)}.")
    except TypeError as error:
        text = str(error) if callable(f) else f"Expected a callable value, got {told(f)}."
        hint = "Write gshard.jit(f, mesh=8), or @gshard.jit(mesh=8) above a function."
        raise ArgumentError(text, user_line(), hint=hint) from None
    refuse_device("gshard.jit", device if backend is None else backend)
    if uneven not in ("gather", "keep"):
        raise ShardingError(f"uneven={uneven!r} is not known.", hint='Write uneven="gather" or uneven="keep".')
    as_of_jax: dict[str, Any] = {
        "in_shardings": in_shardings, "out_shardings": out_shardings, "keep_unused": keep_unused,
        "compiler_options": dict(compiler_options or {}),
    }  # fmt: skip
    static, donated = (static_argnums, static_argnames), (donate_argnums, donate_argnames)
    parameters, as_of_jax, own_mesh = unwrapped(f, as_of_jax, static, donated, leaves=static_leaves)
    as_of_jax["compiler_options"] = tuple(as_of_jax["compiler_options"].items())
    if mesh is None:
        mesh = parameters.f.options.mesh if isinstance(parameters.f, Jitted) else own_mesh
    options = Options.of(
        mesh, strict, memory_limit, plan, layout, names=names, collective_matmul=collective_matmul,
        keep_uneven=uneven == "keep", machine=machine, search=search, finite=bool(finite), **as_of_jax,
    )  # fmt: skip
    return Jitted(parameters.f, parameters, options)
