"""jit: the whole chain, from a marked function to a program that runs on all devices.

     f, args --trace--> Program --propagate--> Plan --partition--> SpmdProgram --compile--> Executable

``gshard.jit(f, mesh=8)`` is used like ``jax.jit``. It runs the chain once for each combination of shapes, dtypes,
shardings of arguments and static values; every intermediate can be had from ``.lower(*args)``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard.analysis.budget import Budget
from gshard.analysis.explain import Explanation, explain_program
from gshard.analysis.overlap import Windowed
from gshard.api.boundary import (
    mark_of_argument,
    mark_of_spec,
    spread_specs,
    with_marked_arguments,
    with_marked_results,
)
from gshard.api.lowered import Lowered
from gshard.api.transformations import Target, call, call_p, function_of
from gshard.core.arguments import agree, kind, own_sharding, positions_and_names
from gshard.core.errors import MeshError, ShardingError, TraceError
from gshard.core.jax_adapter import user_line
from gshard.core.mesh import Mesh
from gshard.core.uneven import UnevenArray
from gshard.passes.trace import closed_of, trace
from gshard.remat.rematerialise import MemoryLimitError, bytes_of


class Jitted:
    """What ``gshard.jit`` returns: call it like the function itself."""

    def __init__(
        self,
        f: Callable[..., Any],
        target: Target,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        shardings: tuple[Any, Any],
        keep_uneven: bool = False,
        memory_limit: int | None = None,
    ):
        functools.update_wrapper(self, f)
        self._f, self._target, self._mesh, self._keep_uneven = f, target, target.mesh, keep_uneven
        self._static, self._donate, self._memory_limit = static, donate, memory_limit
        self._in_shardings, self._out_shardings = shardings
        self._cache: dict[Any, dict[Any, tuple[Lowered, tuple[Any, ...]]]] = {}
        self._calls: dict[Any, tuple[Any, Any]] = {}
        self._ids = {d: i for i, d in enumerate(target.mesh.devices or ())}

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
        target = dataclasses.replace(self._target, mesh=Mesh.of(mesh))
        options = self._keep_uneven, self._memory_limit
        return Jitted(self._f, target, self._static, self._donate, shardings, *options)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The chain for these arguments (arrays or ``jax.ShapeDtypeStruct``): program, plan, spmd, executable."""
        arrays, statics = self._divide(args, kwargs)
        leaves, in_tree = jax.tree.flatten(arrays)
        return self._find(leaves, in_tree, arrays, statics)[0]

    def _inside_a_transformation(self, leaves: Sequence[Any], in_tree: Any, arrays: Any, statics: Any) -> Any:
        """One equation of the program that is being traced, differentiated or mapped; see ``transformations``."""
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
        return jax.tree.unflatten(out_tree, call(jaxpr, self._target, leaves))

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
        options = self._keep_uneven, self._memory_limit
        lowered = Lowered(program, self._target.in_best_order(program), donated, padded, *options)
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
    strict: bool | float = False,
    uneven: str = "gather",
    windowed: bool | int | Windowed = False,
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
        strict: True refuses operations without a rule instead of gathering their operands. A number of bytes also
            refuses a program in which each device sends more than that in one call, and names the lines that do.
        uneven: what becomes of results that lie split in a dimension which does not divide: ``"gather"`` makes it
            whole, since JAX has no such arrays, or cuts a result that nobody marked along another one if that sends
            less; ``"keep"`` returns an ``UnevenArray``, which the next call takes as it lies.
        windowed: which contractions run in steps, part by part, instead of after a gather of an operand or before a
            scatter of the result (figure 4c of the paper): True takes those that send no more bytes so, a number those
            for which a device would hold more bytes than that, and ``Windowed`` says it in detail.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``. What would not fit is computed again
            when it is needed; ``gshard.explain`` says what, and the share of FLOPs.

    Returns:
        a function with the same results; ``.lower(*args)`` gives the chain behind it.

    Raises:
        MeshError: the mesh names devices that do not exist. When called: ShardingError, TraceError, PlanError,
            MemoryLimitError (the program does not fit, whatever is recomputed).

    >>> import jax.numpy as jnp
    >>> from gshard.api.marks import split
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
            windowed=windowed,
            memory_limit=memory_limit,
        )
    if uneven not in ("gather", "keep"):
        raise ShardingError(f"uneven={uneven!r} is not known.", way_out='Write uneven="gather" or uneven="keep".')
    static = positions_and_names(f, static_argnums, static_argnames)
    donate = positions_and_names(f, donate_argnums, donate_argnames)
    shardings = in_shardings, out_shardings
    limit = None if memory_limit is None else bytes_of(memory_limit)
    devices = Mesh.of(mesh)
    target = Target(devices, strict is not False, Budget.of(strict), windowed=Windowed.of(windowed, devices))
    return Jitted(f, target, static, donate, shardings, uneven == "keep", limit)


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
    >>> from gshard.api.marks import split
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
    return Jitted(f, target, frozenset(), frozenset(), (None, None))
