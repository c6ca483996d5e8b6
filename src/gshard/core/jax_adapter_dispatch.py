"""The part of the JAX adapter that a call goes through: JAX's own dispatch in C++, its caches, its trace settings.

A jitted function of JAX's is a C++ object. It knows, for every combination of argument types, shardings, static values
and settings, an executable, and runs it without any Python; only for a new combination it asks a Python function, which
returns the results and what is to be run from then on. ``FastFunction`` is that object with our Python function.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax._src import api_util as _api_util
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import sharding_impls as _sharding_impls
from jax._src import tree_util as _tree_util
from jax._src import util as _util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax

from gshard.core.jax_adapter import closed as open_jaxpr

ArrayImpl = _jax.ArrayImpl


def trace_settings() -> Hashable:
    """JAX's settings that change what tracing makes: x64, matrix precision, random bits, the mesh that is set."""
    return _config.trace_context()  # type: ignore[no-any-return]


def is_staging() -> bool:
    """Whether operations are being recorded for a program now (``jax.jit``, a loop's body) instead of being run."""
    return isinstance(_core.trace_ctx.trace, _partial_eval.DynamicJaxprTrace)


def is_token(x: Any) -> bool:
    """Whether it is a token (``jax.lax.create_token``), of an array or a traced one."""
    return isinstance(x, _core.Token) or (isinstance(x, _core.Tracer) and x.aval is _core.abstract_token)


def looks_for_nans() -> bool:
    """Whether ``jax.debug_nans`` or ``jax.debug_infs`` is on."""
    return bool(_config.debug_nans.value or _config.debug_infs.value)


def logs_compilations() -> bool:
    """Whether ``jax_log_compiles`` is on."""
    return bool(_config.log_compiles.value)


def nan_found(error: BaseException) -> bool:
    """Whether an error says that ``jax.debug_nans`` or ``jax.debug_infs`` has found something."""
    return isinstance(error, _dispatch.InternalFloatingPointError)


def refused_by_dispatch(error: Exception) -> bool:
    """Whether C++ could not take an argument: a static one without a hash, what is not yet an array, a donated one."""
    static, array = "Non-hashable static arguments", "Triggering __jax_array__()"
    return any(x in str(error) for x in (static, array, "has been deleted", "donate the same buffer twice"))


def address_of(x: Any) -> int:
    """Where an array's memory on its first device here begins; two arrays may share it."""
    if (
        type(x) is not ArrayImpl
        or x.is_deleted()
        or not x.addressable_shards
        or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    ):
        return id(x)
    return int(x.addressable_shards[0].data.unsafe_buffer_pointer())


def may_crash_donated(arguments: Any) -> bool:
    """Whether an array is given twice, or was overwritten by an earlier call: donated, it makes XLA:CPU crash.

    Asked before every call that donates, so it is written to take little time.
    """
    leaves = _tree_util.default_registry.flatten(arguments)[0]
    if len(leaves) == 1:
        (x,) = leaves
        return type(x) is ArrayImpl and x.is_deleted()
    arrays = [x for x in leaves if type(x) is ArrayImpl]
    return len({id(x) for x in arrays}) < len(arrays) or any([x.is_deleted() for x in arrays])


def refuse_what_is_no_function(f: Any) -> None:
    """Raises ``TypeError`` for what ``jax.jit`` refuses too: no callable, a generator function, a staticmethod."""
    _api_util.check_callable(f)


def named_arguments(
    f: Callable[..., Any], static: tuple[Any, Any], donated: tuple[Any, Any]
) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
    """Static and donated arguments by number and by name, each completed from the other as ``jax.jit`` does.

    Returns:
        static numbers, static names, donated numbers, donated names.

    Raises:
        ValueError, TypeError: as ``jax.jit``: the function has no such argument, or one is both.
    """
    donate_numbers, donate_names, static_numbers, static_names = _api_util.resolve_argnums(
        f, _api_util.fun_signature(f), *donated, *static
    )
    return static_numbers, static_names, donate_numbers, donate_names


def without_constants(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """A closed jaxpr whose constants are its first arguments, and the constants."""
    body, consts = open_jaxpr(closed)
    if not consts:
        return closed, ()
    lifted = _partial_eval.convert_constvars_jaxpr(body)
    return lifted if body is closed else type(closed)(lifted, ()), consts


def mapped_by(primitive: Any, rule: Callable[..., Any]) -> None:
    """Says how a primitive is mapped: ``rule(mapped axis, operands, dimensions, **parameters)``."""
    _batching.fancy_primitive_batchers[primitive] = rule


def mapped(jaxpr: Any, axis: Any, dims: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A closed jaxpr mapped over an axis as a mapping rule gets it, and the dimensions of the results."""
    return _batching.batch_jaxpr2(jaxpr, axis, tuple(dims))  # type: ignore[no-any-return]


def expanded_by(primitive: Any, rebind: Callable[..., list[Any]]) -> None:
    """How a primitive that holds a function is bound once JAX has expanded the operators that it keeps until then.

    Newer JAX keeps some operators (``SearchSorted``) whole until transformations are done. It expands a primitive that
    holds one of them by ``rebind(operands, expanded jaxpr, parameters)``.
    """

    def expand(*operands: Any, jaxpr: Any, **parameters: Any) -> list[Any]:
        return rebind(operands, _partial_eval.lower_jaxpr2(jaxpr), parameters)

    primitive.to_lojax = expand


_CHECKS_HAVE_A_CONTEXT = hasattr(_checkify, "CheckifyContext")  # newer JAX


def checked_by(primitive: Any, rebind: Callable[..., list[Any]]) -> None:
    """How ``checkify`` treats a primitive that holds a function: ``rebind(operands, checked jaxpr, parameters)``."""

    def check(*given: Any, jaxpr: Any, **parameters: Any) -> tuple[Any, Any]:
        context = given[: int(_CHECKS_HAVE_A_CONTEXT)]
        error, enabled, *operands = given[len(context) :]
        errors, tree = jax.tree.flatten(error)
        every = [*errors, *operands]
        avals = map(jax.typeof, every)
        checked, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(*context, jaxpr, enabled, tree, *avals)
        return jax.tree.unflatten(out_tree, rebind(every, checked, parameters))  # type: ignore[no-any-return]

    _checkify.error_checks[primitive] = check


def emptied_by_jax(cache: Any) -> None:
    """``jax.clear_caches`` calls ``cache.cache_clear()``, while it lives."""
    _util.register_cache(cache, "gshard")


class Cache:
    """What was made for a key, at most so much of it; ``jax.clear_caches`` empties it."""

    def __init__(self, size: int):
        self._size, self._lock, self._made = size, threading.RLock(), OrderedDict[Hashable, Any]()
        emptied_by_jax(self)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is known for the key, or is made now; two threads make it once."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
            made = make()
            self._made[key] = made
            while len(self._made) > self._size:
                self._made.popitem(last=False)
            return made

    def forget(self, key: Hashable) -> None:
        """Drops one entry."""
        with self._lock:
            self._made.pop(key, None)

    def values(self) -> Sequence[Any]:
        """Everything that is known, latest first."""
        with self._lock:
            return tuple(reversed(self._made.values()))

    def cache_clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._made.clear()


def weakly_cached(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps results while the first argument lives, for each of JAX's settings; ``jax.clear_caches`` drops them."""
    return _util.weakref_lru_cache(f, maxsize=1024)  # type: ignore[no-any-return]


class SharedCaches:
    """The caches of functions: what is jitted twice in the same way is traced and compiled once. They die with it."""

    def __init__(self, size: int):
        self._size = size
        self._of: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[Cache, Cache]]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, f: Any, how: Hashable) -> tuple[Cache, Cache]:
        """Two caches for a function that is jitted in this way; its own, if nothing else can find them."""
        try:
            with self._lock:
                known = self._of.setdefault(f, {})
                return known.setdefault(how, (Cache(self._size), Cache(self._size)))
        except TypeError:  # it, or a sharding that it was given, has no hash or no weak reference
            return Cache(self._size), Cache(self._size)


class FastFunction:
    """A function whose calls JAX's C++ dispatches once they have been seen.

    Args:
        f: runs unchanged under ``jax.disable_jit``.
        miss: called for what has not been seen, with the arguments; returns results, what to run for such arguments
            from now on (``fast_path``) or None, and False.
        static_numbers, static_names: arguments that are no arrays.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        miss: Callable[..., Any],
        static_numbers: Sequence[int] = (),
        static_names: Iterable[str] = (),
    ):
        self._cache = _jax.PjitFunctionCache(capacity=256)
        self.call = _jax.pjit(
            getattr(f, "__name__", type(f).__name__),
            lambda *args, **kwargs: f(*args, **kwargs),
            miss,
            tuple(static_numbers),
            tuple(static_names),
            object(),
            _tree_util.dispatch_registry,
            _pxla.cc_shard_arg,
            self._cache,
        )

    def size(self) -> int:
        """How many kinds of calls have been seen."""
        return int(self.call._cache_size())

    def clear(self) -> None:
        """Forgets what has been seen."""
        self._cache.clear()


def coordination() -> Any:
    """The key-value store that processes share since ``jax.distributed.initialize``; None without it."""
    return _distributed.global_state.client


def own_process() -> int:
    """The number of this process among those that share devices."""
    return int(jax.process_index())


def names_devices(jaxpr: Any) -> bool:
    """Whether a program calls back to Python: then JAX takes shardings over one and the same mesh only."""
    return bool(_dispatch.jaxpr_has_prim_requiring_devices(getattr(jaxpr, "jaxpr", jaxpr)))


def forget_traces(f: Any) -> None:
    """Drops JAX's own traces of a function."""
    with contextlib.suppress(TypeError):  # no weak reference to it, so JAX has none either
        _partial_eval.trace_to_jaxpr.evict_weakref(f)


_PACKED = ("int2", "int4", "uint2", "uint4")


def executed(compiled: Any, arrays: Sequence[Any]) -> list[Any]:
    """Runs a compiled program on placed arrays.

    What is called in public compares layouts first, and takes those of 4-bit integers for different ones.
    """
    if any(a.dtype.name in _PACKED for a in compiled._executable.in_avals):
        return list(compiled._executable.unsafe_call(*arrays))
    return list(compiled(*arrays))


def kept_arguments(compiled: Any) -> frozenset[int]:
    """The flat arguments that a compiled program is given, by number."""
    return frozenset(compiled._executable._kept_var_idx)


def input_layouts(compiled: Any, captured: int) -> dict[int, Any]:
    """The layout in memory that a compiled program expects of each flat argument that it reads, by its number.

    Left out are arrays whose layout JAX does not state exactly: random keys, integers of 2 and 4 bits.
    """
    executable = compiled._executable
    read = sorted(executable._kept_var_idx)
    layouts = getattr(executable, "_xla_in_layouts", None) or [None] * len(read)
    found = zip(read, layouts, executable.in_avals, strict=True)
    return {i - captured: layout for i, layout, a in found if i >= captured and layout and _has_plain_layout(a.dtype)}


def _has_plain_layout(dtype: Any) -> bool:
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and dtype.name not in _PACKED


def layout_of(x: Any) -> Any:
    """How an array lies in the memory of its devices."""
    return x.format.layout


def fast_path(compiled: Any, out_tree: Any, results: Sequence[Any], captured: Sequence[Any], leaves: int) -> Any:
    """What C++ needs to run a compiled program by itself, or None where Python has something to do in each call.

    Args:
        compiled: a ``jax.stages.Compiled`` of flat arrays, ``captured`` first.
        out_tree: the structure of its results.
        results: the flat results of one call.
        captured: arrays that come before the arguments.
        leaves: number of arguments.
    """
    executable = compiled._executable
    run = getattr(executable, "unsafe_call", None)
    if not isinstance(executable, _pxla.MeshExecutable) or not isinstance(run, _pxla.ExecuteReplicated):
        return None
    if run.ordered_effects or run.has_unordered_effects or looks_for_nans():
        return None
    flat, tree = _pxla.reflatten_outputs_for_dispatch(out_tree, list(results))
    if not all(type(x) is _jax.ArrayImpl for x in flat):
        return None
    kept = [i in executable._kept_var_idx for i in range(len(captured) + leaves)]
    return _pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        tree,
        _physical(executable._in_shardings, executable.in_avals),
        [x.sharding for x in flat],
        [x.aval for x in flat],
        [x._committed for x in flat],
        kept,
        executable._dispatch_in_layouts,
        list(captured),
    )


def _physical(shardings: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Shardings of the arrays that are really there: a random key is some numbers."""
    extended = [jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in avals]
    return [
        _sharding_impls.physical_sharding(a, s) if is_extended else s
        for s, a, is_extended in zip(shardings, avals, extended, strict=True)
    ]
