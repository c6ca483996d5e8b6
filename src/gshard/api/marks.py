"""Marks: the functions that annotate arrays (GShard paper, section 3.2): one by one, by paths, or as a pipeline."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ShardingError, counted, known_names, listed
from gshard.core.jax_adapter import is_mapped, user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.layout import Names
from gshard.core.mark import (
    REPLICATED,
    Mark,
    Schedule,
    entries_of,
    mark_of_split,
    mark_of_stack,
    text_of_spec,
    words_of,
)
from gshard.core.memory_kinds import memory_of
from gshard.core.paths import is_below, path_inside
from gshard.language.mark_primitive import SENT, bind_mark, bind_names, rounded
from gshard.tracing.expand import mark_of_any_sharding, mark_of_named_sharding


def is_spec(x: Any) -> bool:
    """Whether it says how one array is cut: a ``PartitionSpec``, a sharding of JAX's, an axis name, or None."""
    return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding | str)


def mark_of_spec(spec: Any, x: Any, leaf: str = "") -> Mark | None:
    """A ``PartitionSpec``, a sharding of JAX's or an axis name as a mark on an array; None says nothing."""
    if spec is None:
        return None
    if not is_spec(spec):
        raise ShardingError(
            f"{type(spec).__name__} is no sharding.",
            user_line(),
            f"{leaf}: {spec!r}"[:200] if leaf else f"{spec!r}"[:200],
            "Give a PartitionSpec, a NamedSharding, the name of a mesh axis, or None.",
        )
    if isinstance(spec, jax.sharding.Sharding) and not isinstance(spec, NamedSharding):
        return mark_of_any_sharding(spec, np.shape(x), leaf)
    said = spec.spec if isinstance(spec, NamedSharding) else PartitionSpec(spec) if isinstance(spec, str) else spec
    (entries, more), ndim = words_of(said, user_line()), np.ndim(x)
    if len(entries) > ndim:
        raise ShardingError(
            f"{text_of_spec(entries)} names {len(entries)} dimensions of an array of {ndim}.",
            user_line(),
            f"{leaf}: {describe(x)}" if leaf else describe(x),
            ("Give at most one entry for each dimension." if ndim else "A scalar has none: give P() or None.")
            + hidden_by_vmap([x]),
        )
    if isinstance(spec, NamedSharding):
        return mark_of_named_sharding(spec, ndim, leaf)
    return Mark(spec=entries, leaf=leaf, **more)


def hidden_by_vmap(arrays: Iterable[Any]) -> str:
    """What else to say where dimensions do not exist: the user may have counted one that ``jax.vmap`` hides."""
    if not any(map(is_mapped, arrays)):
        return ""
    return " Inside vmap the dimension that it maps over is hidden: count without it, or mark outside."


def spread(what: str, prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] = is_spec) -> list[tuple[str, Any, Any]]:
    """What a pytree prefix says of each leaf of a tree: its name, what is said, and the leaf."""
    said: list[Any] = []
    try:
        jax.tree.map(lambda s, part: said.extend([s] * len(jax.tree.leaves(part))), prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ShardingError(
            f"the pytree of {what} does not match the pytree that is marked.",
            user_line(),
            " ".join(str(error).replace("tree_map tree", what).split()),
            f"Give one for all, or a pytree that is a prefix; for arguments a tuple, {what}=(...,). "
            "For the dimensions of one array write P('data', None).",
        ) from error
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), s, x) for (path, x), s in zip(leaves, said, strict=True)]


def memories_of(in_shardings: Any, arguments: tuple[Any, Any]) -> list[str | None]:
    """The memory kind in which ``in_shardings`` puts each leaf of ``(positional, named)`` arguments; None for any."""
    positional, named = arguments
    prefix = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    kinds = [memory_of(spec) for _, spec, _ in spread("in_shardings", prefix, positional)]
    return [*kinds, *(None for _ in jax.tree.leaves(named))]


def as_array(x: Any, leaf: str, what: str) -> Any:
    """A leaf as an array that can be marked; None for the gradient of an integer, which has no elements."""
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return None
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise ShardingError(
            f"{leaf or 'what is marked'} is of type {type(x).__name__}, not an array.",
            user_line(),
            f"{what} of {x!r}"[:200],
            "Mark arrays only: leave it out of the pytree, or split the pytree in arrays and the rest.",
        ) from error


def describe(x: Any) -> str:
    """The type of an array as text, such as ``f32[8,4]``."""
    is_shape = isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray)
    aval = jax.core.ShapedArray(x.shape, x.dtype) if is_shape else jax.typeof(x)
    return aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)


def told(x: Any) -> str:
    """What something is, in a message: ``an array f32[8,4]``."""
    return f"an array {describe(x)}" if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) else repr(x)[:200]


# Checks the arguments of ``split``: a dimension, and a number of parts or names of mesh axes.


_SPLIT = (
    "The dimension comes first: split(x, 0, 'data') for a mesh axis or a tuple of them, split(x, 0, 8) for a number of "
    "parts, split(x, {0: 'data', 1: 'model'}) for two dimensions. A PartitionSpec goes to shard(x, P(...))."
)


def dimension_of(dim: Any, call: str) -> int:
    """A dimension, checked to be a number."""
    number = _number(dim)
    if number is None:
        raise ShardingError(f"{dim!r} is no dimension of an array.", user_line(), call, _SPLIT)
    return number


def partitions_of(partitions: Any, call: str) -> int | str | tuple[str, ...]:
    """A number of parts or names of axes, checked to be one or the other."""
    if isinstance(partitions, str):
        return partitions
    if isinstance(partitions, tuple | list) and partitions and all(isinstance(n, str) for n in partitions):
        return tuple(partitions)
    number = _number(partitions)
    if number is None or number < 1:
        what = f"{partitions!r} is neither a number of parts, from 1 on, nor a mesh axis or several."
        raise ShardingError(what, user_line(), call, _SPLIT)
    return number


def _number(x: Any) -> int | None:
    """A whole number; None for anything else."""
    try:
        return None if isinstance(x, bool | np.bool_) else operator.index(x)
    except TypeError:
        if isinstance(x, jax.core.Tracer):
            raise  # JAX says best that a value is needed
        return None


# Checks ``send=`` of marks, and marks the arrays of a pytree in the precision in which they are sent.


def marked(x: Any, leaves: Sequence[tuple[str, Any]], marks: Sequence[Mark | None], send: Any) -> Any:
    """The pytree with its arrays marked; those without a mark as they are."""
    given, tree = jax.tree.flatten(x)
    send = _precision_of(send)
    results = [
        old if mark is None or array is None else _bound(name, array, mark, send)
        for old, (name, array), mark in zip(given, leaves, marks, strict=True)
    ]
    arrays = [array for (_, array), mark in zip(leaves, marks, strict=True) if mark is not None and array is not None]
    if send is not None and arrays and not any(map(_holds_floats, arrays)):
        hint = f"Leave out send={send!r}: it rounds floats."
        raise ShardingError("no array has floats to round.", user_line(), f"{describe(arrays[0])}; {send=}", hint)
    return jax.tree.unflatten(tree, results)


def _precision_of(send: Any) -> str | None:
    """The name of the dtype that ``send=`` gives; None for None."""
    if send is None:
        return None
    try:
        name = send if isinstance(send, str) else str(jnp.dtype(send))
    except TypeError:
        name = repr(send)
    if name not in SENT:
        raise ShardingError(f"arrays cannot be sent as {name}.", user_line(), hint=known_names(name, SENT, "Use"))
    return name


def _holds_floats(x: Any) -> bool:
    """Whether it is an array of floats, which ``send`` may round, and no Python number."""
    is_python_number = not x.shape and getattr(x, "weak_type", False)
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and not is_python_number


def _bound(name: str, array: Any, mark: Mark, send: str | None) -> Any:
    """One array with its mark, rounded if ``send`` is narrower than its floats."""
    if send is None:
        return bind_mark(array, mark)
    shown = f"{name}: {describe(array)}; send={send!r}" if name else f"{describe(array)}; send={send!r}"
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        hint = "Mark its real and its imaginary part, or leave out send=."
        raise ShardingError(f"complex numbers cannot be sent as {send}.", user_line(), shown, hint)
    if not _holds_floats(array) or array.dtype == send:
        return bind_mark(array, mark)
    if array.dtype.itemsize <= jnp.dtype(send).itemsize:
        what = f"{array.dtype} has no wider elements than {send}."
        raise ShardingError(what, user_line(), shown, "Leave out send=.")
    if mark.unreduced or mark.reduced:
        what = f"parts of a sum cannot be sent as {send}."
        hint = "Reduce the sum first: mark it without unreduced and reduced, then with send=."
        raise ShardingError(what, user_line(), f"{shown}; {mark}", hint)
    return rounded(jnp.asarray(array), dataclasses.replace(mark, send=send, wide=str(array.dtype)))


T = TypeVar("T")  # an array or a pytree of arrays: marks return what they get


@without_our_frames
def replicate(x: T, *, send: Any = None) -> T:
    """Marks an array, or every array of a pytree, to be whole on every device.

    Args:
        x: array or pytree of arrays, any shape and dtype.
        send: ``"int8"`` or ``"bfloat16"``: see ``split``.

    Returns:
        the same values; with ``send`` floats are rounded.

    Raises:
        ShardingError: a leaf is no array, or cannot be sent like this.

    >>> import jax.numpy as jnp
    >>> replicate(jnp.arange(3)).tolist()
    [0, 1, 2]
    """
    leaves = arrays_of(x, "replicate(x)")
    return marked(x, leaves, [dataclasses.replace(REPLICATED, leaf=name) for name, _ in leaves], send)


@overload
def split(x: T, dim: int, over: int | str | Sequence[str], *, send: Any = None) -> T: ...


@overload
def split(x: T, dim: Mapping[int, str | Sequence[str]], *, send: Any = None) -> T: ...


@without_our_frames
def split(x: Any, dim: Any, over: Any = None, *, send: Any = None) -> Any:
    """Marks dimension ``dim`` of an array to be split over mesh axes or in a number of parts, all others whole.

    With fewer parts than devices each part is held by several consecutive devices. A size that the number of parts
    does not divide is fine: parts have ``ceil(size / parts)`` elements and the last ones are shorter or empty.

    A mark replaces an earlier one: ``split(split(x, 0, "data"), 1, "model")`` moves the array, and dimension 0 is whole
    after it. To split two dimensions give both: ``split(x, {0: "data", 1: "model"})``.

    Args:
        x: array or pytree of arrays. Those of a pytree that do not have the dimension (the scalar ``count`` of an
            optimizer) are left open.
        dim: the dimension, from 0; negative counts from the end. Or a dictionary from dimensions to names of axes.
        over: the name of a mesh axis, a tuple of names, the first one major, or a number of parts.
        send: the dtype in which devices send the array: ``"bfloat16"``, or ``"int8"`` with a float32 scale for each row
            along the last dimension. The result is rounded to it, also without a mesh; its dtype and its derivative
            stay (``docs/marks.md``). Arrays of a pytree that hold no floats are not rounded.

    Returns:
        the same values; with ``send`` floats are rounded.

    Raises:
        ShardingError: the dimension does not exist, in any array of a pytree; a leaf is no array; or ``over`` is
            neither a number from 1 on nor the name of an axis or several. Or ``send`` is no such dtype, or an array is
            complex, or has no wider elements, or is no array of floats.

    >>> import jax.numpy as jnp
    >>> split(jnp.zeros((8, 4)), 0, 4).shape
    (8, 4)
    """
    if isinstance(dim, Mapping):
        return _split_over_axes(x, dim, over, send)
    call = f"split(x, {dim!r}{'' if over is None else f', {over!r}'})"
    dim, parts = dimension_of(dim, call), partitions_of(over, call)
    leaves = arrays_of(x, call)
    ndims, has = _having((dim,), x, leaves, call)
    marks = [
        mark_of_split(dim % ndim, parts, name) if found else None
        for (name, _), ndim, found in zip(leaves, ndims, has, strict=True)
    ]
    return marked(x, leaves, marks, send)


def _split_over_axes(x: Any, axes: Mapping[Any, Any], over: Any, send: Any) -> Any:
    """``split`` by a dictionary from dimensions to names of mesh axes."""
    call = f"split(x, {dict(axes)!r}{'' if over is None else f', {over!r}'})"
    names = {dimension_of(dim, call): partitions_of(said, call) for dim, said in axes.items()}
    if over is not None or not names or any(isinstance(said, int) for said in names.values()):
        raise ShardingError("a dictionary for split maps dimensions to mesh axes.", user_line(), call, _SPLIT)
    leaves = arrays_of(x, call)
    ndims, has = _having(tuple(names), x, leaves, call)
    marks: list[Mark | None] = []
    for (leaf, array), ndim, found in zip(leaves, ndims, has, strict=True):
        spec = {dim % ndim: said for dim, said in names.items()} if found else {}
        if found and len(spec) < len(names):
            hint = "Name each dimension once; a tuple of axes splits one over several."
            raise ShardingError("a dimension is split twice.", user_line(), f"{describe(array)}; {call}", hint)
        entries = tuple(spec.get(d) for d in range(ndim))
        marks.append(Mark(spec=entries, leaf=leaf, source_text=call) if found else None)
    return marked(x, leaves, marks, send)


def _having(dims: Sequence[int], x: Any, leaves: Sequence[tuple[str, Any]], call: str) -> tuple[list[int], list[bool]]:
    """The ranks of the arrays, and which of them have these dimensions."""
    ndims = [-1 if array is None else array.ndim for _, array in leaves]
    has = [all(-ndim <= dim < ndim for dim in dims) for ndim in ndims]
    if leaves and not any(has):
        most = max(*ndims, 0)
        wrong = next((dim for dim in dims if not -most <= dim < most), dims[0])
        what = f"an array of {counted(most, 'dimension')} has no dimension {wrong} to split."
        if not jax.tree_util.all_leaves([x]):
            what = f"no array of the pytree has a dimension {wrong} to split."
        hint = f"Use a dimension from 0 to {most - 1}." if most else "A scalar cannot be split; use replicate(x)."
        hint += hidden_by_vmap(array for _, array in leaves)
        raise ShardingError(what, user_line(), f"{arrays_text(leaves)}; {call}", hint)
    return ndims, has


@without_our_frames
def shard(x: T, spec: Any, *, send: Any = None) -> T:
    """Marks how an array is cut along all its dimensions.

    Args:
        x: array (or pytree of arrays, if they all fit the spec).
        spec: either an integer array of device ids of the rank of ``x``, element ``[i, j]``
            naming the device that holds part ``[i, j]`` (paper, appendix A.3), or a
            ``jax.sharding.PartitionSpec`` over the axis names of the mesh, a ``NamedSharding``, or one axis name for
            dimension 0; or a pytree prefix of these, in which None leaves arrays open. Fewer ids than devices
            (``arange(n)``) means that each part is held by several consecutive devices. Any order of ids will do:
            results and arguments are sharded as it says, and the program runs with the devices in that order. A
            ``PartitionSpec`` with ``unreduced={"model"}`` keeps the value in parts along these axes and states that
            they are finite; they may pass products then (``docs/marks.md``).
        send: ``"int8"`` or ``"bfloat16"``: see ``split``.

    Returns:
        the same values; with ``send`` floats are rounded.

    Raises:
        ShardingError: wrong rank, a leaf that is no array, a pytree that is no prefix of ``x``, or an array that cannot
            be sent like this. When a program is planned: a device id is given twice, or is none of the mesh.

    >>> import jax.numpy as jnp
    >>> shard(jnp.zeros((8, 4)), np.arange(8).reshape(4, 2)).shape
    (8, 4)
    """
    said = jax.tree.leaves(spec, is_leaf=_is_assignment)
    leaves = arrays_of(x, "shard(x, ...)")
    if said and all(map(_is_assignment, said)):
        each = [s for _, s, _ in spread("shardings", spec, x, _is_assignment)]
    else:  # numbers in lists, for every array
        each = [spec] * len(leaves)
    return marked(x, leaves, [_mark_of(s, array, name) for (name, array), s in zip(leaves, each, strict=True)], send)


@without_our_frames
def name(x: T, names: Any) -> T:
    """Names the dimensions of an array: a mark whose meaning comes from the layout.

    ``gshard.jit(f, layout=Layout(batch="data", embed=None))`` splits what is called ``batch`` and keeps whole what is
    called ``embed``; names that the layout does not mention are open, as all are without a layout. Outside of
    gshard it is the identity; the cotangent of a named value has the same names; what ``vmap`` adds has none.

    Args:
        x: array, or pytree of arrays.
        names: a word for each dimension: ``"batch length embed"``; ``_`` says nothing about one, and ``...`` nothing
            about any number. Or a ``PartitionSpec`` of names, as ``flax.linen.get_partition_spec`` gives; or a
            pytree prefix of these, in which None says nothing.

    Returns:
        the same values.

    Raises:
        ShardingError: there are more or fewer names than dimensions, a leaf is no array, or a pytree is no prefix.

    >>> import jax.numpy as jnp
    >>> name(jnp.zeros((2, 3, 4)), "batch ... embed").shape
    (2, 3, 4)
    """
    leaves, tree = jax.tree.flatten(x)
    named = []
    for leaf, (path, said, _) in zip(
        leaves, spread("names", names, x, lambda s: s is None or isinstance(s, str | PartitionSpec)), strict=True
    ):
        array = as_array(leaf, f"x{path}" if path else "", "name(x, ...)")
        plain = array is None or said is None
        named.append(leaf if plain else bind_names(array, _names_of(said, array, f"x{path}" if path else "")))
    return jax.tree.unflatten(tree, named)


def _names_of(said: Any, x: Any, leaf: str) -> Names:
    """The names of one array."""
    if not isinstance(said, str | PartitionSpec):
        raise ShardingError(
            f"{type(said).__name__} names no dimensions.",
            user_line(),
            f"{leaf}: {said!r}"[:200] if leaf else repr(said)[:200],
            'Write a word for each dimension: "batch length embed".',
        )
    ndim = np.ndim(x)
    if isinstance(said, str):
        words: list[str | None] = [None if word == "_" else word for word in said.split()]
    else:
        if said.unreduced or said.reduced:
            entries_of(said, user_line())  # which refuses it
        words = list(said)
        if len(words) < ndim:
            words += [None] * (ndim - len(words))
    shown = f"{leaf}: {describe(x)}, named {said!r}" if leaf else f"{describe(x)}, named {said!r}"
    if wrong := [word for word in words if word is not None and not (isinstance(word, str) and ":" not in word)]:
        hint = "Names are words without ':'."
        raise ShardingError(f"{wrong[0]!r} is no name of a dimension.", user_line(), shown, hint)
    if words.count("...") == 1:
        i = words.index("...")
        words = [*words[:i], *[None] * max(ndim - len(words) + 1, 0), *words[i + 1 :]]
    if len(words) != ndim or "..." in words:
        what = f"an array of {counted(ndim, 'dimension')} has {counted(len(words), 'name')}."
        if "..." in words:
            what = "'...' stands twice among the names of one array."
        raise ShardingError(
            what, user_line(), shown, "Name each dimension once; '_' says nothing about one, '...' about several."
            + hidden_by_vmap([x]),
        )  # fmt: skip
    return Names(tuple(words))


def arrays_of(x: Any, call: str) -> list[tuple[str, Any]]:
    """The leaves as arrays, and what to call each in a message: ``x['l1']['w']``, and nothing if there is but one."""
    leaves = jax.tree_util.tree_leaves_with_path(x)
    names = [f"x{jax.tree_util.keystr(path)}" if path else "" for path, _ in leaves]
    return [(name, as_array(leaf, name, call)) for name, (_, leaf) in zip(names, leaves, strict=True)]


def arrays_text(leaves: Sequence[tuple[str, Any]]) -> str:
    """The first arrays of a pytree, as text."""
    shown = [f"{name}: {describe(array)}" if name else describe(array) for name, array in leaves]
    return ", ".join(listed(shown, 3))


def _is_assignment(x: Any) -> bool:
    return is_spec(x) or isinstance(x, np.ndarray | jax.Array)


def _mark_of(said: Any, array: Any, leaf: str) -> Mark | None:
    """What ``shard`` takes for one array, as a mark."""
    return None if array is None else (mark_of_spec if is_spec(said) else _mark_of_ids)(said, array, leaf)


def _mark_of_ids(assignment: Any, x: Any, leaf: str) -> Mark:
    ndim, which = np.ndim(x), f"{leaf}: " if leaf else ""
    try:
        ids = np.asarray(assignment)
    except ValueError:  # lists of different lengths
        ids = np.asarray(assignment, dtype=object)
    if ids.dtype.kind not in "iu":
        raise ShardingError(
            "a device assignment is an array of integers or a PartitionSpec.",
            user_line(),
            f"{which}got {type(assignment).__name__} of {ids.dtype}",
            "For a 2x4 cut over 8 devices: np.arange(8).reshape(2, 4); over named axes: P('data', 'model').",
        )
    if ids.ndim != ndim:
        raise ShardingError(
            f"a device assignment of rank {ids.ndim} cannot cut an array of rank {ndim}.",
            user_line(),
            f"{which}{describe(x)}; device assignment of shape {ids.shape}",
            "Give one dimension of device ids for each dimension of the array (size 1 where it stays whole)."
            + hidden_by_vmap([x]),
        )
    return Mark(ids=tuple(ids.ravel().tolist()), ids_shape=ids.shape, leaf=leaf)


# Marks many arrays of a pytree at once, by patterns of their paths (``shard_by_path``).


@without_our_frames
def shard_by_path(x: T, assignments: Mapping[str, Any], *, send: Any = None) -> T:
    """Marks the arrays of a pytree whose paths match a pattern; all other arrays stay open.

    Args:
        x: pytree of any kind: dictionaries, an NNX state, an Equinox module. The path of ``x["layers"][0]["w1"]`` and
            of ``x.layers[0].w1`` is ``layers/0/w1``. What no pattern matches need not be an array.
        assignments: for each pattern what ``shard`` takes for one array, such as a ``PartitionSpec``. In a pattern
            ``*`` stands for anything inside of a component and ``**`` for any number of components. A pattern is for
            all that is below the paths that it matches. The first pattern that matches counts.
        send: ``"int8"`` or ``"bfloat16"``: see ``split``.

    Returns:
        the same values; with ``send`` floats that a pattern matches are rounded.

    Raises:
        ShardingError: a pattern matches nothing, or nothing that an earlier one does not match; or an assignment does
            not fit an array.

    >>> import jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"layers": [{"w1": jnp.ones((8, 4)), "b": jnp.ones(4)}] * 2}
    >>> jax.tree.map(jnp.shape, shard_by_path(params, {"layers/*/w1": P("data")}))
    {'layers': [{'b': (4,), 'w1': (8, 4)}, {'b': (4,), 'w1': (8, 4)}]}
    """
    keyed = jax.tree_util.tree_leaves_with_path(x)
    paths = [path_inside(keys) for keys, _ in keyed]
    patterns = [next((p for p in assignments if is_below(p, path)), None) for path in paths]
    for said in assignments:
        if said not in patterns:
            raise unused_pattern(said, paths)
    leaves: list[tuple[str, Any]] = []
    marks: list[Mark | None] = []
    for (_, leaf), path, pattern in zip(keyed, paths, patterns, strict=True):
        name = f"{path} ({pattern!r})"
        leaves.append((name, None if pattern is None else as_array(leaf, name, "shard_by_path(x, ...)")))
        marks.append(None if pattern is None else _mark_of(assignments[pattern], leaves[-1][1], name))
    return marked(x, leaves, marks, send)


def unused_pattern(pattern: str, paths: Sequence[str]) -> ShardingError:
    """The error for a pattern that marks nothing in a pytree with these paths."""
    hidden = any(is_below(pattern, path) for path in paths)
    what = "matches only what an earlier pattern matches" if hidden else "matches no path"
    hint = "Put it in front." if hidden else known_names(pattern, paths, "Paths are")
    return ShardingError(f"the pattern {pattern!r} {what}.", user_line(), f"a pytree of {len(paths)}", hint)


# Marks layers that run as a pipeline (``pipeline``).

_PIPELINE = "Write pipeline(stacked, 'stage', micro_batches=8)."


@without_our_frames
def pipeline(
    x: T,
    over: int | str | Sequence[str],
    *,
    micro_batches: int,
    rounds: int = 1,
    paths: str | Sequence[str] | None = None,
) -> T:
    """Marks layers as the stages of a pipeline.

    A loop ``jax.lax.scan(layer, x, stacked)`` over the marked stack runs as a pipeline on a mesh: each stage has
    ``layers / stages`` layers, the batch of the carry is cut into micro-batches, and all stages run at once, each on
    another micro-batch. The loop of the derivative is a pipeline in the other direction. Results are those of the
    loop, up to the order in which gradients of weights are added up. Outside of a mesh the mark is the identity.

    A layer must compute each row of the batch alone. The batch is the first dimension of the carry if the rows along it
    are independent, and otherwise the next dimension along which they are.

    Args:
        x: array ``[layers, ...]``, or pytree of such arrays, any dtypes. Of separate layers, equal pytrees, make one by
            ``jax.tree.map(lambda *w: jnp.stack(w), *layers)``: on a mesh one all-to-all moves the weights to their
            stages, and one moves the gradients back.
        over: the mesh axis of the stages, a tuple of axes, or a number of stages.
        micro_batches: their number. It divides the batch. A stage waits in ``stages - 1`` of
            ``micro_batches * rounds + stages - 1`` turns.
        rounds: how often each micro-batch passes all stages. The first stage has the first layers of each round, and
            so on. The mark leaves the stack open then, since a stage has layers that are apart.
        paths: patterns of paths as of ``shard_by_path``: only what they match is marked. None marks all of ``x``.

    Returns:
        the same values.

    Raises:
        ShardingError: an array has no layers, or the arrays have different numbers of them; a number is no positive
            integer; or a pattern matches nothing. When a program is planned: layers or rows
            are not divisible, or a layer mixes the rows of the batch.

    >>> import jax, jax.numpy as jnp
    >>> stacked = pipeline(jnp.stack([jnp.eye(3), 2 * jnp.eye(3)]), "stage", micro_batches=2)
    >>> jax.lax.scan(lambda x, w: (x @ w, None), jnp.ones((8, 3)), stacked)[0].sum().tolist()
    48.0
    """
    call = f"pipeline(x, {over!r}, micro_batches={micro_batches!r})"
    for word, number in (("micro_batches", micro_batches), ("rounds", rounds)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < 1:
            raise ShardingError(f"{word} is a positive integer, not {number!r}.", user_line(), call, _PIPELINE)
    schedule = Schedule(partitions_of(over, call), int(micro_batches), int(rounds))
    leaves = _matching(x, call, (paths,) if isinstance(paths, str) else paths)
    of_count = {array.shape[:1]: (name, array) for name, array in leaves if array is not None}
    if len(of_count) > 1 or () in of_count:
        what = "the arrays of a pipeline have one dimension of layers, and it comes first."
        hint = (
            "Mark only the stacks that one loop scans over, each with as many layers. Stack separate layers: "
            "jax.tree.map(lambda *w: jnp.stack(w), *layers)."
        )
        raise ShardingError(what, user_line(), f"{arrays_text([*of_count.values()])}; {call}", hint)
    marks = [None if x is None else mark_of_stack(schedule, x.ndim, name) for name, x in leaves]
    return marked(x, leaves, marks, None)  # type: ignore[no-any-return]


def _matching(x: Any, call: str, patterns: Sequence[str] | None) -> list[tuple[str, Any]]:
    """The leaves as of ``arrays_of``, with None for those that no pattern matches."""
    leaves = arrays_of(x, call)
    if patterns is None:
        return leaves
    paths = [path_inside(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(x)]
    for pattern in patterns:
        if not any(is_below(pattern, path) for path in paths):
            raise unused_pattern(pattern, paths)
    matches = [any(is_below(pattern, path) for pattern in patterns) for path in paths]
    return [(name, array if is_match else None) for (name, array), is_match in zip(leaves, matches, strict=True)]
