"""jit: the whole chain, from a marked function to a program that runs on all devices.

     f, args --trace--> Program --propagate--> Plan --partition--> SpmdProgram --compile--> Executable

``gshard.jit(f, mesh=8)`` is used like ``jax.jit``. It runs the chain once for each combination of shapes, dtypes,
shardings of arguments and static values; every intermediate can be had from ``.lower(*args)``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gshard.analysis.explain import Explanation, explain_program
from gshard.analysis.machine import Machine, kind_of_devices
from gshard.core.errors import MeshError, ShardingError, TraceError
from gshard.core.jax_adapter import user_line
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.core.uneven import UnevenArray
from gshard.passes.arguments import agree, kind, own_sharding, positions_and_names
from gshard.passes.compile import Executable, compile_spmd, named_sharding
from gshard.passes.compose import Target, call, call_p, function_of
from gshard.passes.partition import partition
from gshard.passes.propagate import propagate
from gshard.passes.specs import (
    mark_of_argument,
    mark_of_spec,
    spread_specs,
    with_marked_arguments,
    with_marked_results,
)
from gshard.passes.trace import closed_of, trace
from gshard.remat.fit import compiled_within
from gshard.remat.rematerialise import MemoryLimitError, bytes_of, rematerialise


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One function made ready for one kind of arguments; each stage is made when it is first asked for.

    Attributes:
        program: the traced function.
        mesh: the devices.
        strict: whether operations without a rule are refused.
        donated: arguments whose memory the results may take.
        padded: inputs that come in padded parts, and how they lie.
        keep_uneven: whether results leave so.
        memory_limit: bytes that a device may hold; what does not fit is recomputed.
        machine: tells what that takes; None takes the devices of the mesh.
    """

    program: Program
    mesh: Mesh
    strict: bool
    donated: frozenset[int]
    padded: Mapping[int, Sharding] = dataclasses.field(default_factory=dict)
    keep_uneven: bool = False
    memory_limit: int | None = None
    machine: Machine | None = None

    @functools.cached_property
    def plan(self) -> Plan:
        """The sharding of every value, and why."""
        return propagate(self.program, self.mesh, strict=self.strict)

    @functools.cached_property
    def spmd(self) -> SpmdProgram:
        """The one program that all devices run."""
        if self.memory_limit is None:
            return self._all_kept
        return rematerialise(self._all_kept, self.memory_limit, self._machine, self.donated)

    @functools.cached_property
    def _all_kept(self) -> SpmdProgram:
        return partition(self.plan, self.padded, keep_uneven=self.keep_uneven)

    @property
    def _machine(self) -> Machine:
        return self.machine or Machine.of(kind_of_devices(self.mesh), self.mesh.size)

    @property
    def argument_shardings(self) -> tuple[Any, ...]:
        """Where each flat argument is expected, as JAX's ``NamedSharding``: what lies so is not moved by a call."""
        return tuple(named_sharding(self.mesh, s) for s in self.spmd.in_shardings[len(self.program.captured) :])

    def results(self, arrays: Sequence[Any]) -> Any:
        """The executable's flat results as the user gets them: a pytree, what left in padded parts as what it is."""
        found = zip(self.program.block.outputs, self.spmd.out_shardings, arrays, strict=True)
        leaves = [x if s.is_even(self.mesh, v.shape) else UnevenArray(x, v.shape, s, self.mesh) for v, s, x in found]
        return jax.tree.unflatten(self.program.out_tree, leaves)

    @functools.cached_property
    def executable(self) -> Executable:
        """The compiled program; call it with the flat arguments.

        Where the compiler needs more memory than was modelled, it recomputes more than ``spmd`` to keep to the limit.
        """
        if self.memory_limit is None:
            return compile_spmd(self.spmd, self.donated)
        return compiled_within(self._all_kept, self.memory_limit, self._machine, self.donated)

    def __str__(self) -> str:
        return f"{self.plan}\n\n{self.spmd}"


class Jitted:
    """What ``gshard.jit`` returns: call it like the function itself."""

    def __init__(
        self,
        f: Callable[..., Any],
        mesh: Mesh,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        shardings: tuple[Any, Any],
        strict: bool,
        keep_uneven: bool = False,
        memory_limit: int | None = None,
    ):
        functools.update_wrapper(self, f)
        self._f, self._mesh, self._strict, self._keep_uneven = f, mesh, strict, keep_uneven
        self._static, self._donate, self._memory_limit = static, donate, memory_limit
        self._in_shardings, self._out_shardings = shardings
        self._cache: dict[Any, dict[Any, tuple[Lowered, tuple[Any, ...]]]] = {}
        self._calls: dict[Any, tuple[Any, Any]] = {}
        self._ids = {d: i for i, d in enumerate(mesh.devices or ())}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arrays, statics = self._divide(args, kwargs)
        leaves, in_tree = jax.tree.flatten(arrays)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            leaves = [x.whole() if isinstance(x, UnevenArray) else x for x in leaves]
            arrays = jax.tree.unflatten(in_tree, leaves)
            return self._inside_a_transformation(leaves, in_tree, arrays, statics)
        lowered, targets = self._find(leaves, in_tree, arrays, statics)
        # Everything is put in its place first: JAX would compile again for arguments that lie otherwise.
        pairs = zip((x.padded if isinstance(x, UnevenArray) else x for x in leaves), targets, strict=True)
        moved = [x if getattr(x, "sharding", None) == t else jax.device_put(x, t) for x, t in pairs]
        self._check_donations(lowered.donated, moved)
        return lowered.results(lowered.executable(*moved))

    def _check_donations(self, donated: frozenset[int], arrays: Sequence[Any]) -> None:
        """An array that is given twice must not be donated: XLA may crash."""
        at: dict[int, int] = {}
        for i, x in enumerate(arrays if donated else ()):
            first = at.setdefault(id(x), i)
            if first != i and {first, i} & donated:
                raise ShardingError(
                    f"{self._f.__name__} may overwrite an array that it was given twice, as arguments {first} and {i}.",
                    user_line(),
                    f"donated: arguments {', '.join(map(str, sorted(donated)))}, counted as flat arrays",
                    "Give a copy (jnp.copy), or do not donate it.",
                )
            if i in donated and getattr(x, "is_deleted", bool)():
                raise ShardingError(
                    f"{self._f.__name__} was given an array that an earlier call has overwritten, as argument {i}.",
                    user_line(),
                    way_out="Use the earlier call's result, or do not donate it.",
                )

    def on(self, mesh: Any) -> Jitted:
        """The same function for another mesh."""
        shardings = self._in_shardings, self._out_shardings
        options = self._strict, self._keep_uneven, self._memory_limit
        return Jitted(self._f, Mesh.of(mesh), self._static, self._donate, shardings, *options)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The chain for these arguments (arrays or ``jax.ShapeDtypeStruct``): program, plan, spmd, executable."""
        arrays, statics = self._divide(args, kwargs)
        leaves, in_tree = jax.tree.flatten(arrays)
        return self._find(leaves, in_tree, arrays, statics)[0]

    def _inside_a_transformation(self, leaves: Sequence[Any], in_tree: Any, arrays: Any, statics: Any) -> Any:
        """One equation of the program that is being traced, differentiated or mapped; see ``passes.compose``."""
        if self._memory_limit is not None:
            raise MemoryLimitError(
                f"{self._f.__name__} has a memory_limit, and a transformation around it decides what is kept.",
                user_line(),
                way_out="Take the gradient inside: gshard.jit(jax.grad(f), mesh=..., memory_limit=...).",
            )
        key = (in_tree, statics, tuple(kind(x) for x in leaves))
        if key not in self._calls:
            f = self._with_statics(statics)
            if self._in_shardings is not None:
                f = with_marked_arguments(f, self._in_shardings)
            if self._out_shardings is not None:
                f = with_marked_results(f, self._out_shardings)
            self._calls[key] = closed_of(f, *arrays[0], **arrays[1])
        jaxpr, out_tree = self._calls[key]
        return jax.tree.unflatten(out_tree, call(jaxpr, Target(self._mesh, self._strict), leaves))

    def _divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """Arguments that are arrays, and those that are static, as hashable pairs.

        What lies in padded parts on other devices is made whole here.
        """
        args, kwargs = jax.tree.map(
            lambda x: x.whole() if isinstance(x, UnevenArray) and x.mesh != self._mesh else x, (args, kwargs)
        )
        if not self._static:
            return (args, kwargs), ()
        statics: tuple[tuple[int | str, Any], ...] = tuple((i, args[i]) for i in range(len(args)) if i in self._static)
        statics += tuple((k, kwargs[k]) for k in sorted(kwargs) if k in self._static)
        for name, value in statics:
            try:
                hash(value)
            except TypeError as error:
                raise TraceError(
                    f"static argument {name!r} of {self._f.__name__} cannot be hashed.",
                    user_line(),
                    f"a {type(value).__name__}",
                    "Give a tuple or another value that is hashable and does not change.",
                ) from error
        positional = tuple(a for i, a in enumerate(args) if i not in self._static)
        named = {k: v for k, v in kwargs.items() if k not in self._static}
        return (positional, named), (len(args), *statics)

    def _find(
        self, leaves: Sequence[Any], in_tree: Any, arrays: Any, statics: tuple[Any, ...]
    ) -> tuple[Lowered, tuple[Any, ...]]:
        key = (in_tree, statics, tuple(kind(x) for x in leaves))
        lies = tuple(own_sharding(x) for x in leaves)
        known = self._cache.setdefault(key, {})
        found = known.get(lies)
        if found is None:
            # A program that chose for its arguments the shardings that they have by now will do.
            fitting = (made for made in known.values() if agree(lies, made[1]))
            found = next(fitting, None)
            known[lies] = found = found or self._make(leaves, arrays, statics)
        return found

    def _make(self, leaves: Sequence[Any], arrays: Any, statics: tuple[Any, ...]) -> tuple[Lowered, tuple[Any, ...]]:
        f = self._with_statics(statics)
        marks = [mark_of_argument(x, self._ids) for x in leaves]
        if self._in_shardings is not None:
            given = spread_specs("in_shardings", self._in_shardings, arrays[0])
            marks[: len(given)] = [mark_of_spec(s, x) or m for s, x, m in zip(given, leaves, marks, strict=False)]
        if self._out_shardings is not None:
            f = with_marked_results(f, self._out_shardings)
        args, kwargs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, UnevenArray) else x, arrays
        )
        program = trace(f, *args, argument_marks=marks, **kwargs)
        padded = {len(program.captured) + i: x.lies for i, x in enumerate(leaves) if isinstance(x, UnevenArray)}
        donated = self._donated_leaves(arrays, statics)
        lowered = Lowered(program, self._mesh, self._strict, donated, padded, self._keep_uneven, self._memory_limit)
        if self._mesh.devices is None:
            return lowered, (None,) * len(leaves)
        return lowered, lowered.argument_shardings

    def _with_statics(self, statics: tuple[Any, ...]) -> Callable[..., Any]:
        if not statics:
            return self._f
        count, *pairs = statics
        by_position = {k: v for k, v in pairs if isinstance(k, int)}
        by_name = {k: v for k, v in pairs if isinstance(k, str)}

        @functools.wraps(self._f)
        def f(*args: Any, **kwargs: Any) -> Any:
            rest = iter(args)
            full = [by_position[i] if i in by_position else next(rest) for i in range(count)]
            return self._f(*full, **by_name, **kwargs)

        del f.__wrapped__
        return f

    def _donated_leaves(self, arrays: Any, statics: tuple[Any, ...]) -> frozenset[int]:
        if not self._donate:
            return frozenset()
        static = {k for k, _ in statics[1:]} if statics else set()
        count = statics[0] if statics else len(arrays[0])
        positions = [i for i in range(count) if i not in static]
        donated: set[int] = set()
        at = 0
        for position, argument in [*zip(positions, arrays[0], strict=True), *sorted(arrays[1].items())]:
            size = len(jax.tree.leaves(argument))
            if position in self._donate:
                donated |= set(range(at, at + size))
            at += size
        return frozenset(donated)


def jit(
    f: Callable[..., Any] | None = None,
    *,
    mesh: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    strict: bool = False,
    uneven: str = "gather",
    memory_limit: int | str | None = None,
) -> Any:
    """Partitions a function over a mesh; used like ``jax.jit``, as a call or a decorator.

    Args:
        f: a function of pytrees of arrays, written for one device, with marks.
        mesh: a ``jax.sharding.Mesh``, a number of devices, or a list of devices.
        static_argnums, static_argnames: arguments that are plain (hashable) values, not arrays.
        donate_argnums, donate_argnames: arguments whose memory the results may take.
        in_shardings: for the positional arguments (that are not static) a pytree prefix of ``PartitionSpec``,
            ``NamedSharding`` or None (not said); counts as marks on them.
        out_shardings: the same for the results.
        strict: refuse operations without a rule instead of gathering their operands.
        uneven: what becomes of results that lie split in a dimension which does not divide: ``"gather"`` makes it
            whole, since JAX has no such arrays; ``"keep"`` returns an ``UnevenArray``, which the next call takes as it
            lies.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``. What would not fit is computed again
            when it is needed; ``gshard.explain`` says what, and the share of FLOPs.

    Returns:
        a function with the same results; ``.lower(*args)`` gives the chain behind it.

    Raises:
        MeshError: the mesh names devices that do not exist. When called: ShardingError, TraceError, PlanError,
            MemoryLimitError (the program does not fit, whatever is recomputed).

    >>> import jax.numpy as jnp
    >>> from gshard.passes.annotate import split
    >>> double = jit(lambda x: 2 * split(x, 0, 1), mesh=1)
    >>> double(jnp.arange(3)).tolist()
    [0, 2, 4]
    """
    if f is None:
        return functools.partial(
            jit,
            mesh=mesh,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            strict=strict,
            uneven=uneven,
            memory_limit=memory_limit,
        )
    if uneven not in ("gather", "keep"):
        raise ShardingError(f"uneven={uneven!r} is not known.", way_out='Write uneven="gather" or uneven="keep".')
    static = positions_and_names(f, static_argnums, static_argnames)
    donate = positions_and_names(f, donate_argnums, donate_argnames)
    shardings = in_shardings, out_shardings
    limit = None if memory_limit is None else bytes_of(memory_limit)
    return Jitted(f, Mesh.of(mesh), static, donate, shardings, strict, uneven == "keep", limit)


def explain(f: Callable[..., Any], *args: Any, mesh: Any = None, **kwargs: Any) -> Explanation:
    """Tells how a function would be partitioned, without compiling or running it.

    Args:
        f: a marked function, or one that ``gshard.jit`` returned.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``.
        mesh: as for ``jit``, or an abstract mesh of any size (``gshard.Mesh.abstract(data=64, expert=32)``); not
            needed for a function from ``gshard.jit``.

    Returns:
        the explanation; print it, or write it as a page by ``.html(path)``.

    >>> import jax.numpy as jnp
    >>> from gshard.passes.annotate import split
    >>> found = explain(lambda x: split(x, 0, 4).sum(), jnp.zeros((8, 2)), mesh=Mesh.abstract(data=4))
    >>> found.bytes_by_kind
    {'all_reduce': 6}
    """
    if mesh is None and not isinstance(f, Jitted):
        raise MeshError("explain needs a mesh.", way_out="Write explain(f, *args, mesh=8).")
    if isinstance(f, Jitted):
        jitted = f if mesh is None else f.on(mesh)
    else:
        jitted = jit(f, mesh=mesh)
    lowered = jitted.lower(*args, **kwargs)
    return explain_program(lowered.plan, lowered.spmd, lowered.donated)


@call_p.def_impl
def _call_now(*arguments: Any, jaxpr: Any, target: Target) -> list[Any]:
    """A call whose arguments are all there: what a derivative taken outside of ``jax.jit`` comes to."""
    return list(_jitted(jaxpr, target)(*arguments))


@functools.lru_cache(maxsize=256)
def _jitted(jaxpr: Any, target: Target) -> Jitted:
    f = function_of(jaxpr, "call")
    return Jitted(f, target.mesh, frozenset(), frozenset(), (None, None), target.strict)
