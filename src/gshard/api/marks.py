"""Marks: the functions that annotate arrays (GShard paper, section 3.2).

    x = gshard.split(x, 0, 8)                  # dimension 0 in 8 partitions
    x = gshard.split(x, {0: "data", 2: "model"})   # two dimensions, each over a mesh axis
    w = gshard.replicate(w)                    # the same on every device
    y = gshard.shard(y, P("data", "model"))    # or a NamedSharding, or an array of device ids
    z = gshard.name(z, "batch length embed")   # a mark whose meaning comes from jit(..., layout=...)

Outside of gshard a mark is an identity: under plain ``jax.jit``, ``grad``, ``vmap``, ``scan`` and on
one device a marked program computes what the unmarked one does. Inside ``gshard.jit`` it fixes the
sharding of the value from there on; a second mark on a marked value moves it, as two sharding constraints of JAX's do.
The cotangent of a marked value carries the same mark.

Only what can be told without a mesh is checked here (ranks, dimensions, device ids); what needs the
mesh is checked when a program is traced (``core.mark``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.sharding import PartitionSpec

from gshard.api.mark_arguments import dimension_of, partitions_of
from gshard.api.sending import marked
from gshard.api.specs import as_array, describe, hidden_by_vmap, is_spec, mark_of_spec, spread
from gshard.core.errors import ShardingError, counted
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.keywords import keywords
from gshard.core.layout import Names
from gshard.core.mark import Mark
from gshard.core.partition_spec import entries_of
from gshard.language.mark_primitive import bind_names

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
    return marked(x, leaves, [Mark("replicate", leaf=name) for name, _ in leaves], send)


@overload
def split(x: T, dim: int, over: int | str | Sequence[str], *, send: Any = None) -> T: ...


@overload
def split(x: T, dim: Mapping[int, str | Sequence[str]], *, send: Any = None) -> T: ...


@keywords("Write split(x, 0, 'data'), split(x, 0, 8) or split(x, {0: 'data', 1: 'model'}).")
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
    dim = dimension_of(dim, over, call)
    if over is None:
        hint = f"Write split(x, {dim}, 'data') for a mesh axis, or split(x, {dim}, 8) for a number of parts."
        raise ShardingError("split does not say over what the dimension is split.", user_line(), call, hint)
    parts = partitions_of(over, call)
    leaves = arrays_of(x, call)
    ndims, has = _having((dim,), x, leaves, call)
    marks = [
        Mark("split", dim=dim % ndim, partitions=parts, leaf=name) if found else None
        for (name, _), ndim, found in zip(leaves, ndims, has, strict=True)
    ]
    return marked(x, leaves, marks, send)


def _split_over_axes(x: Any, axes: Mapping[Any, Any], over: Any, send: Any) -> Any:
    """``split`` by a dictionary from dimensions to names of mesh axes."""
    call = f"split(x, {dict(axes)!r}{'' if over is None else f', {over!r}'})"
    dims = {dimension_of(dim, over, call): said for dim, said in axes.items()}
    names = {dim: partitions_of(said, call) for dim, said in dims.items()}
    if over is not None or not names or any(isinstance(said, int) for said in names.values()):
        hint = "For one dimension and a number of parts write split(x, 0, 8); to split none use replicate(x)."
        if over is not None:
            hint = "Leave out the last argument."
        raise ShardingError("a dictionary for split maps dimensions to mesh axes.", user_line(), call, hint)
    leaves = arrays_of(x, call)
    ndims, has = _having(tuple(names), x, leaves, call)
    marks: list[Mark | None] = []
    for (leaf, array), ndim, found in zip(leaves, ndims, has, strict=True):
        spec = {dim % ndim: said for dim, said in names.items()} if found else {}
        if found and len(spec) < len(names):
            hint = "Name each dimension once; a tuple of axes splits one over several."
            raise ShardingError("a dimension is split twice.", user_line(), f"{describe(array)}; {call}", hint)
        entries = tuple(spec.get(d) for d in range(ndim))
        marks.append(Mark("spec", spec=entries, leaf=leaf, source_text=call) if found else None)
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
        hint = "A scalar cannot be split; use replicate(x)."
        if most:
            hint = f"Use a dimension from 0 to {most - 1}." if most > 1 else "Its only dimension is 0."
        hint += hidden_by_vmap(array for _, array in leaves)
        raise ShardingError(what, user_line(), f"{listed(leaves)}; {call}", hint)
    return ndims, has


@keywords("Write shard(x, P('data', None)).")
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
        ShardingError: wrong rank, a device id given twice or negative, a leaf that is no array, a pytree that is
            no prefix of ``x``, or an array that cannot be sent like this.

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
    marks = [
        None if array is None else (mark_of_spec if is_spec(s) else _mark_of_ids)(s, array, name)
        for (name, array), s in zip(leaves, each, strict=True)
    ]
    return marked(x, leaves, marks, send)


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
    for leaf, (path, said, _) in zip(leaves, spread("names", names, x, is_names), strict=True):
        array = as_array(leaf, f"x{path}" if path else "", "name(x, ...)")
        plain = array is None or said is None
        named.append(leaf if plain else bind_names(array, names_of(said, array, f"x{path}" if path else "")))
    return jax.tree.unflatten(tree, named)


def is_names(x: Any) -> bool:
    """Whether it says how the dimensions of one array are called."""
    return x is None or isinstance(x, str | PartitionSpec)


def names_of(said: Any, x: Any, leaf: str, at: str = "") -> Names:
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
    return Names(tuple(words), at)


def arrays_of(x: Any, call: str) -> list[tuple[str, Any]]:
    """The leaves as arrays, and what to call each in a message: ``x['l1']['w']``, and nothing if there is but one."""
    leaves = jax.tree_util.tree_leaves_with_path(x)
    names = [f"x{jax.tree_util.keystr(path)}" if path else "" for path, _ in leaves]
    return [(name, as_array(leaf, name, call)) for name, (_, leaf) in zip(names, leaves, strict=True)]


def listed(leaves: Sequence[tuple[str, Any]]) -> str:
    """The first arrays of a pytree, as text."""
    shown = [f"{name}: {describe(array)}" if name else describe(array) for name, array in leaves[:3]]
    return ", ".join(shown) + (", ..." if len(leaves) > 3 else "")


def _is_assignment(x: Any) -> bool:
    return is_spec(x) or isinstance(x, np.ndarray | jax.Array)


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
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ShardingError(
            f"device {int(values[counts > 1][0])} stands twice in the device assignment.",
            user_line(),
            f"{which}{describe(x)}; device assignment {ids.tolist()}",
            "Each device holds one part; leave devices out to replicate over the rest.",
        )
    return Mark("assignment", ids=tuple(ids.ravel().tolist()), ids_shape=ids.shape, leaf=leaf)
