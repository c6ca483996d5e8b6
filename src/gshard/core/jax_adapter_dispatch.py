"""Adapts gshard to JAX's dispatch of calls in C++, to its caches and to its trace settings.

A jitted function of JAX is a C++ object with an executable for each combination of types, shardings, static values and
settings; for a new one it calls Python. ``FastFunction`` is this object with a function of gshard.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import sharding_impls as _sharding_impls
from jax._src import tree_util as _tree_util
from jax._src import util as _util
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax

from gshard.core.jax_adapter import closed as open_jaxpr

ArrayImpl = _jax.ArrayImpl


def is_staging() -> bool:
    """Whether JAX currently records operations for a program (``jax.jit``, a loop's body) instead of running them."""
    return isinstance(_core.trace_ctx.trace, _partial_eval.DynamicJaxprTrace)


def logs_compilations() -> bool:
    """Whether ``jax_log_compiles`` is on."""
    return bool(jax.log_compiles.value)


def refused_by_dispatch(error: Exception) -> bool:
    """Whether the dispatch in C++ has refused an argument: not hashable, ``__jax_array__``, deleted, donated twice."""
    refusals = (
        "Non-hashable static arguments",
        "Triggering __jax_array__()",
        "has been deleted",
        "donate the same buffer twice",
    )
    return any(text in str(error) for text in refusals)


def address_of(x: Any) -> int:
    """The address of an array's memory on its first addressable device. Two arrays may share one address."""
    x = _physical_array(x)
    if type(x) is not ArrayImpl or x.is_deleted() or not x.addressable_shards:
        return id(x)
    return int(x.addressable_shards[0].data.unsafe_buffer_pointer())


def may_crash(arguments: Any, donates: bool) -> bool:
    """Whether XLA on CPU may crash: an array is deleted, or a call that donates gets one array twice.

    gshard checks this before calls on several devices, so the check must be fast.
    """
    leaves = _tree_util.dispatch_registry.flatten(arguments)[0]  # random keys become arrays of integers
    if len(leaves) == 1:
        (x,) = leaves
        return type(x) is ArrayImpl and x.is_deleted()
    arrays = [x for x in leaves if type(x) is ArrayImpl]
    return any([x.is_deleted() for x in arrays]) or (donates and len({id(x) for x in arrays}) < len(arrays))


def put_arguments(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Places the arguments of a call. ``jax.transfer_guard("disallow")`` refuses those that are on other devices.

    Such moves are implicit, as those of ``jax.jit``. ``jax.device_put`` is explicit.
    """
    placed, reuse = list(arrays), _dispatch.ArrayCopySemantics.REUSE_INPUT
    for i, (x, s) in enumerate(zip(arrays, shardings, strict=True)):
        if not isinstance(x, jax.Array) or x.sharding.device_set != s.device_set:
            (placed[i],) = jax.lax.device_put_p.bind(x, devices=(s,), srcs=(None,), copy_semantics=(reuse,))
    return list(jax.device_put(placed, list(shardings)))


def without_constants(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """A closed jaxpr with its constants as first arguments, and the constants."""
    body, consts = open_jaxpr(closed)
    if not consts:
        return closed, ()
    lifted = _partial_eval.convert_constvars_jaxpr(body)
    return lifted if body is closed else type(closed)(lifted, ()), consts


def emptied_by_jax(cache: Any) -> None:
    """Registers a cache whose ``cache_clear()`` ``jax.clear_caches`` calls, as long as the cache lives."""
    _util.register_cache(cache, "gshard")


class Cache:
    """A thread-safe cache that keeps the most recently used entries; ``jax.clear_caches`` empties it."""

    def __init__(self, size: int):
        self._size = size
        self._lock = threading.RLock()
        self._entries = OrderedDict[Hashable, Any]()
        emptied_by_jax(self)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key. A missing value is computed by ``make``, once for all threads."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
            value = make()
            self._entries[key] = value
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
            return value

    def values(self) -> Sequence[Any]:
        """All values, most recently used first."""
        with self._lock:
            return tuple(reversed(self._entries.values()))

    def cache_clear(self) -> None:
        """Removes all entries."""
        with self._lock:
            self._entries.clear()


def weakly_cached(f: Callable[..., Any]) -> Callable[..., Any]:
    """Caches results as long as the first argument lives, for each setting of JAX; ``jax.clear_caches`` drops them."""
    return _util.weakref_lru_cache(f, maxsize=1024)  # type: ignore[no-any-return]


class FastFunction:
    """A function whose calls JAX dispatches in C++ after the first call of each kind."""

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
        """The number of kinds of calls in the cache."""
        return int(self.call._cache_size())

    def clear(self) -> None:
        """Empties the cache."""
        self._cache.clear()


def coordination() -> Any:
    """The key-value store that processes share after ``jax.distributed.initialize``; None before."""
    return _distributed.global_state.client


def names_devices(jaxpr: Any) -> bool:
    """Whether a program calls back to Python. JAX then requires that all shardings have the same mesh."""
    return bool(_dispatch.jaxpr_has_prim_requiring_devices(getattr(jaxpr, "jaxpr", jaxpr)))


_PACKED = ("int2", "int4", "uint2", "uint4")


def executed(compiled: Any, arrays: Sequence[Any]) -> list[Any]:
    """Runs a compiled program on placed arrays.

    The public call compares layouts first, and wrongly finds that the layouts of 4-bit integers differ.
    """
    if any(a.dtype.name in _PACKED for a in compiled._executable.in_avals):
        return list(compiled._executable.unsafe_call(*arrays))
    return list(compiled(*arrays))


def kept_arguments(compiled: Any) -> frozenset[int]:
    """The numbers of the flat arguments that a compiled program reads."""
    return frozenset(compiled._executable._kept_var_idx)


def input_layouts(compiled: Any, captured: int) -> dict[int, Any]:
    """The memory layout that a compiled program expects, for each number of a flat argument that it reads.

    The result omits arrays whose layout JAX does not state exactly: random keys, and integers of 2 and 4 bits.
    """
    executable = compiled._executable
    numbers = sorted(executable._kept_var_idx)
    layouts = getattr(executable, "_xla_in_layouts", None) or [None] * len(numbers)
    return {
        i - captured: layout
        for i, layout, aval in zip(numbers, layouts, executable.in_avals, strict=True)
        if i >= captured and layout
        if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) and aval.dtype.name not in _PACKED
    }


def layout_of(x: Any) -> Any:
    """The memory layout of an array."""
    return x.format.layout


def fast_path(compiled: Any, out_tree: Any, results: Sequence[Any], captured: Sequence[Any], leaves: int) -> Any:
    """The data with which C++ runs a compiled program without Python; None if each call needs Python."""
    executable = compiled._executable
    run = getattr(executable, "unsafe_call", None)
    if not isinstance(executable, _pxla.MeshExecutable) or not isinstance(run, _pxla.ExecuteReplicated):
        return None
    looks_for_nans = jax.debug_nans.value or jax.debug_infs.value
    if run.ordered_effects or run.has_unordered_effects or looks_for_nans:
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
        list(map(_physical_array, captured)),
    )


def _physical_array(x: Any) -> Any:
    """The array of integers of random keys; other arrays themselves."""
    return getattr(x, "_base_array", x)


def _physical(shardings: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """The shardings of the physical arrays: a random key consists of several integers."""
    extended = [jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in avals]
    return [
        _sharding_impls.physical_sharding(a, s) if is_extended else s
        for s, a, is_extended in zip(shardings, avals, extended, strict=True)
    ]
