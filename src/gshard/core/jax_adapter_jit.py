"""Adapts gshard to ``jax.jit``: the options of a call, and a substitute for the compiler behind it, in one thread."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax._src import pjit as _pjit
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax.experimental import layout as _layout
from jax.extend.core import Var, jaxpr_as_fun

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import closed, user_line
from gshard.core.jax_adapter_retracing import arrays_alone

_OPEN = (type(None), _sharding_impls.UnspecifiedValue)  # types that leave a sharding open


@dataclasses.dataclass(frozen=True, slots=True)
class Jitted:
    """The options of a jitted function, for its flat arguments and results."""

    name: str  # the name of the function
    # whether a file of JAX or gshard defines the function. Most functions of ``jax.numpy`` are jitted, and JAX jits
    # functions of its own to move arrays, which expect their results on one device.
    is_left_to_jax: bool
    argument_names: tuple[str, ...]  # the names of the flat arguments, in the user's terms
    # in_shardings, out_shardings: the sharding of each argument and each result; None if it is open
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    has_layouts: bool  # whether the options contain memory layouts
    donated: tuple[int, ...]  # the numbers of the arguments whose memory results may reuse
    keep_unused: bool  # whether XLA receives arguments that nothing reads
    compiler_options: tuple[tuple[str, Any], ...]  # options of XLA, as pairs

    @staticmethod
    def of(parameters: dict[str, Any]) -> Jitted:
        """The options in the parameters of a ``jit`` equation."""
        jaxpr = parameters["jaxpr"]
        return Jitted(
            parameters["name"],
            _is_left_to_jax(closed(jaxpr)[0].debug_info.func_filename),
            argument_names(jaxpr),
            tuple(None if isinstance(s, _OPEN) else s for s in parameters["in_shardings"]),
            tuple(None if isinstance(s, _OPEN) else s for s in parameters["out_shardings"]),
            any(layout is not None for layout in (*parameters["in_layouts"], *parameters["out_layouts"])),
            tuple(i for i, donated in enumerate(parameters["donated_invars"]) if donated),
            parameters["keep_unused"],
            tuple(parameters["compiler_options_kvs"]),
        )


_JAX = os.path.dirname(jax.__file__) + os.sep
_GSHARD = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MOE = os.path.join(_GSHARD, "moe") + os.sep  # a library of models


def _is_left_to_jax(source: str | None) -> bool:
    if source is None:
        return False
    if source.startswith(_GSHARD):
        return not source.startswith(_MOE)
    return source.startswith(_JAX)


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of one call."""

    results: Sequence[Any]  # the flat results
    # the ``jax.stages.Compiled`` that JAX's dispatch in C++ runs in later calls; None if each call needs Python
    compiled: Any
    captured: Sequence[Any]  # the captured arrays, which precede the arguments


class Substitute(Protocol):
    """A compiler that replaces JAX's while it is set. A method that returns None leaves the work to JAX."""

    def run(self, jaxpr: Any, jitted: Jitted, arguments: Sequence[Any]) -> Ran | None:
        """Calls a jitted function."""

    def lower(self, jaxpr: Any, jitted: Jitted, types: Sequence[tuple[Any, Any]], trees: tuple[Any, Any]) -> Any:
        """Lowers a jitted function for arguments of these types, (committed) shardings and tree structures."""


_substitute = jax.make_user_context(None)


def _run(original: Callable[..., Any], *arguments: Any, **parameters: Any) -> Any:
    substitute = _substitute.value
    if substitute is None:
        return original(*arguments, **parameters)
    jitted = Jitted.of(parameters)
    if jitted.is_left_to_jax:
        return original(*arguments, **parameters)
    with no_substitute():
        ran = substitute.run(parameters["jaxpr"], jitted, arguments)
    if ran is None:
        return original(*arguments, **parameters)
    return ran.results, None if ran.compiled is None else ran.compiled._executable, None, list(ran.captured)


def _lower(original: Callable[..., Any], traced: Any, **options: Any) -> Any:
    substitute = _substitute.value
    if substitute is None:
        return original(traced, **options)
    lojax = traced.lojax
    jitted = Jitted.of(lojax._params)
    if jitted.is_left_to_jax:
        return original(traced, **options)
    types, trees = lojax._meta_tys_flat, (lojax._in_tree, lojax.out_tree)
    with no_substitute():
        if all(x is None for x in options.values()):
            read = [(t.aval, t.sharding if t.committed else None) for t in types]
            lowered = substitute.lower(lojax.jaxpr, jitted, read, trees)
            return original(traced, **options) if lowered is None else lowered
    raise ArgumentError(
        f"{jitted.name} is exported, or lowered with options, in a block of gshard.instead_of_jit.",
        user_line(),
        ", ".join(name for name, x in options.items() if x is not None),
        f"Export it outside of the block: jax.export.export(gshard.jit({jitted.name}, mesh=...)).",
    )


class _Hooks:
    """Replaces two functions of JAX while any thread has a substitute."""

    def __init__(self) -> None:
        self._lock, self._entered = threading.Lock(), 0
        self._originals: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                run, lower = self._originals = _pjit._pjit_call_impl_python, jax.stages.Traced.lower
                _pjit._pjit_call_impl_python = lambda *args, **parameters: _run(run, *args, **parameters)
                jax.stages.Traced.lower = lambda traced, **options: _lower(lower, traced, **options)  # type: ignore[method-assign]
        try:
            yield
        finally:
            with self._lock:
                self._entered -= 1
                if not self._entered:
                    assert self._originals is not None
                    _pjit._pjit_call_impl_python, jax.stages.Traced.lower = self._originals  # type: ignore[method-assign]
                    self._originals = None


_HOOKS = _Hooks()


@contextlib.contextmanager
def substituted(substitute: Substitute) -> Iterator[None]:
    """A context manager: in this thread a substitute compiles all jitted functions. The substitute must be hashable."""
    with _HOOKS.held(), _substitute(substitute):
        yield


def has_substitute() -> bool:
    """Whether a substitute compiles jitted functions in this thread."""
    return _substitute.value is not None


def no_substitute() -> Any:
    """A context manager inside which JAX compiles jitted functions."""
    return _substitute(None)


# Reads the options with which ``jax.jit`` was called, and adapts gshard to the equations of ``jax.jit``.


@dataclasses.dataclass(frozen=True, slots=True)
class GivenToJit:
    """The arguments of one call of ``jax.jit``."""

    f: Callable[..., Any]  # the function
    static: tuple[tuple[int, ...], tuple[str, ...]]  # numbers and names of static arguments
    donated: tuple[tuple[int, ...], tuple[str, ...]]  # numbers and names of donated arguments
    in_shardings: Any  # in_shardings, out_shardings: pytree prefixes of shardings; None if the user gave none
    out_shardings: Any
    layouts: tuple[Any, ...]  # the memory layouts in the given shardings (each the layout of a ``Format``)
    keep_unused: bool  # whether XLA receives arguments that nothing reads
    compiler_options: Mapping[str, Any]  # options of XLA
    device: Any  # the device or the backend; None if the user gave none
    resolves: bool  # whether ``None`` among the shardings has a meaning (``pjit``)

    def without_static(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call that are no static arguments."""
        numbers, names = self.static
        static = {i % len(args) if -len(args) <= i < 0 else i for i in numbers}
        return [x for i, x in enumerate(args) if i not in static], {k: v for k, v in kwargs.items() if k not in names}


def given_to_jit(f: Any) -> GivenToJit | None:
    """The arguments of the ``jax.jit`` call that returned a function; None for any other function.

    For a bound method of a jitted function, argument numbers do not count the bound argument.
    """
    if isinstance(f, types.MethodType):
        options = given_to_jit(f.__func__)
        return None if options is None else _of_method(options, f.__self__)
    info = getattr(f, "_jit_info", None)
    if not isinstance(f, _jax.PjitFunction) or info is None:
        return None
    layouts = (*info.in_layouts_leaves, *info.out_layouts_leaves)
    return GivenToJit(
        f._fun,
        (tuple(info.static_argnums), tuple(info.static_argnames)),
        (tuple(info.donate_argnums), tuple(info.donate_argnames)),
        _given(info.in_shardings_treedef, info.in_shardings_leaves),
        _given(info.out_shardings_treedef, info.out_shardings_leaves),
        tuple(x for x in layouts if x is not None),
        info.keep_unused,
        dict(info.compiler_options_kvs),
        info.device or info.backend,
        info.use_resource_env,
    )


def _given(tree: Any, leaves: Sequence[Any]) -> Any:
    if all(isinstance(x, _OPEN) for x in leaves):
        return None
    return jax.tree.unflatten(tree, leaves)


def _of_method(given: GivenToJit, owner: Any) -> GivenToJit:
    f = types.MethodType(given.f, owner)
    bound = next(iter(inspect.signature(given.f).parameters), None)

    def without_first(
        arguments: tuple[tuple[int, ...], tuple[str, ...]],
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        numbers, names = arguments
        return tuple(i - 1 if i > 0 else i for i in numbers if i), tuple(n for n in names if n != bound)

    in_shardings = given.in_shardings
    if isinstance(in_shardings, tuple) and 0 not in given.static[0]:  # there is a sharding for the owner
        in_shardings = in_shardings[1:]
    return dataclasses.replace(
        given, f=f, static=without_first(given.static), donated=without_first(given.donated), in_shardings=in_shardings
    )


def jitted_like(jitted: Any, f: Callable[..., Any], keep_unused: bool = False) -> Any:
    """Another function from ``jax.jit``, with the same static and donated arguments."""
    given = given_to_jit(jitted)
    assert given is not None
    return jax.jit(
        f, static_argnums=given.static[0], static_argnames=given.static[1], donate_argnums=given.donated[0],
        donate_argnames=given.donated[1], keep_unused=keep_unused,
    )  # fmt: skip


def jaxpr_and_constants(traced: jax.stages.Traced) -> tuple[Any, list[Any]]:
    """What JAX has traced: a closed jaxpr of arrays, and the arrays of a trace around that are its first arguments."""
    return arrays_alone(traced.jaxpr), list(traced._consts)


def argument_names(jaxpr: Any) -> tuple[str, ...]:
    """The names of the arguments of a closed jaxpr, in the user's terms."""
    names, count = closed(jaxpr)[0].debug_info.arg_names or (), len(jaxpr.in_avals)
    return tuple(name or f"args[{i}]" for i, name in enumerate(names if len(names) == count else ("",) * count))


def has_default_layout(layout: Any, sharding: Any, aval: Any) -> bool:
    """Whether a memory layout is the default layout of arrays of this type."""
    return isinstance(layout, _layout.Layout) and bool(_pxla.is_default_layout(layout, sharding, aval))


def bound_without_shardings(primitive: Any, params: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
    """Binds the equation of a ``jit`` to these arrays, without its shardings and layouts."""
    unspecified = {k: (_sharding_impls.UNSPECIFIED,) * len(params[k]) for k in ("in_shardings", "out_shardings")}
    no_layout = {k: (None,) * len(params[k]) for k in ("in_layouts", "out_layouts")}
    results: list[Any] = primitive.bind(*arrays, **{**params, **unspecified, **no_layout})
    return results


def calls_of_jit(traced: Any) -> list[Any]:
    """The equations of the jitted functions that a traced function calls."""
    return [e for e in traced.jaxpr.eqns if e.primitive.name in ("jit", "pjit")]


def operands_of_call(traced: Any, call: Any) -> list[int | None]:
    """The operands of an equation: which arguments of the traced function they are; None for others."""
    numbers = {v: i for i, v in enumerate(traced.jaxpr.invars)}
    return [numbers.get(v) if isinstance(v, Var) else None for v in call.invars]


def arguments_of_call(traced: Any, call: Any) -> dict[str, int]:
    """The arguments of a jitted function that a traced function calls: the numbers of its own, by name."""
    names = call.params["jaxpr"].jaxpr.debug_info.arg_names or ()
    passed = operands_of_call(traced, call)
    pairs = list(zip(names, passed, strict=False)) if len(names) == len(passed) else []
    return {name: i for name, i in pairs if i is not None and list(names).count(name) == 1}


def shardings_of_call(call: Any) -> list[Any]:
    """The shardings that ``jax.jit`` was given, of arguments and results; None for those that are open."""
    return [None if isinstance(s, _OPEN) else s for n in ("in", "out") for s in call.params[f"{n}_shardings"]]


def jitted_as(call: Any, jaxpr: Any) -> Any:
    """A jaxpr as a function from ``jax.jit``, with the options of the equation of a jitted function."""

    def given(kind: str) -> list[Any] | None:
        pairs = zip(call.params[f"{kind}_shardings"], call.params[f"{kind}_layouts"], strict=True)
        made = [_layout.Format(layout, s) if layout else None if isinstance(s, _OPEN) else s for s, layout in pairs]
        return None if all(s is None for s in made) else made

    function, ins, donated = jaxpr_as_fun(jaxpr), given("in"), call.params["donated_invars"]

    def named(*arrays: Any) -> Any:
        return function(*arrays)

    named.__name__ = call.params["name"]
    return jax.jit(
        named, in_shardings=None if ins is None else tuple(ins), out_shardings=given("out"),
        donate_argnums=[i for i, is_donated in enumerate(donated) if is_donated],
        keep_unused=call.params["keep_unused"], compiler_options=dict(call.params["compiler_options_kvs"]),
    )  # fmt: skip
