"""Sorting and the k largest elements, along dimensions that may be split, with the least communication."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, identity
from gshard.comm.steps import ALL_TO_ALL
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import NO_CONTEXT, itemsize
from gshard.core.rule import Rule, RuleMaker, Split
from gshard.core.xla_workarounds import all_to_all
from gshard.language.registry import Call, rule
from gshard.rules.along_axis import AlongAxis

# Sorts along a split dimension with the least communication. All methods are stable.


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The sizes of columnsort for a dimension of ``n`` elements in ``parts`` parts."""

    n: int
    parts: int

    @property
    def size(self) -> int:
        """The number of elements of a part, including padding."""
        return -(-self.n // self.parts)

    @property
    def rows(self) -> int:
        """The number of elements of a column: the size of a part rounded up to a multiple of ``parts``."""
        return -(-self.size // self.parts) * self.parts

    @property
    def border(self) -> int:
        """The largest distance from the end of its column of an element that belongs to the next column."""
        return self.parts * (self.parts - 1)

    @property
    def fit(self) -> bool:
        """Whether columns are long enough for columnsort."""
        return self.parts > 1 and self.rows >= 2 * self.border

    @property
    def windows(self) -> tuple[Window, Window, Window]:
        """The windows that a column needs of the previous and the next column, and that a part needs of all columns."""
        n, parts, rows, border = self.rows * self.parts, self.parts, self.rows, self.border
        before, after = Window(n, -border, rows, parts, border), Window(n, rows, rows, parts, border)
        return before, after, Window(n, 0, self.size, parts, self.size)

    @property
    def padded(self) -> bool:
        """Whether columns contain padding."""
        return self.rows * self.parts != self.n

    @property
    def number_dtype(self) -> Any:
        """The dtype for the numbers of elements and of padding."""
        return jnp.uint16 if self.rows * self.parts < 2**16 else jnp.uint32

    def bytes(self, each: int, number: int) -> int:
        """Bytes that a device sends for elements of ``each`` bytes with a number of ``number`` bytes each."""
        dealt = self.rows // self.parts * (self.parts - 1)
        before, after, own = (window.bytes(self.rows, 1) for window in self.windows)
        return dealt * each + (dealt + before + after) * (each + number) + own * each


def ways(n: int, parts: int, others: int, sizes: Sequence[int], num_keys: int, twins: bool) -> dict[str, int]:
    """The methods of sorting, with the bytes that each device sends."""
    size, each = -(-n // parts), sum(sizes)
    across = -(-others // parts) * (parts - 1)
    bytes_of = {"together": (parts - 1) * size * others * each, "crosswise": 2 * across * size * each}
    columns = Columns(n, parts)
    if columns.fit:
        number = 0 if twins else jnp.dtype(columns.number_dtype).itemsize
        bytes_of["columns"] = others * columns.bytes(each, number)
    return bytes_of


def are_twins(dtypes: Sequence[Any], num_keys: int) -> bool:
    """Whether elements that compare equal have equal bits: there are no floats, and all operands are keys."""
    exact = all(jnp.issubdtype(d, jnp.integer) or jnp.dtype(d) == jnp.bool_ for d in dtypes)
    return exact and num_keys == len(dtypes)


def sort_split(shards: Shards, operands: Sequence[Any], axis: int, n: int, num_keys: int, atoms: Atoms) -> list[Any]:
    """Sorts local parts along ``axis``, a dimension of ``n`` elements that is split over ``atoms``."""
    parts = shards.mesh.count(atoms)
    shape = operands[0].shape
    moved = [jnp.moveaxis(x, axis, -1) for x in operands]
    flat = [x.reshape(-1, x.shape[-1]) for x in moved]
    dtypes = [x.dtype for x in operands]
    twins = are_twins(dtypes, num_keys)
    bytes_of = ways(n, parts, flat[0].shape[0], [d.itemsize for d in dtypes], num_keys, twins)
    cheapest = min(bytes_of, key=lambda name: bytes_of[name])
    method = {"together": _together, "crosswise": _crosswise, "columns": _columns}[cheapest]
    results = method(shards, flat, n, num_keys, atoms)
    return [jnp.moveaxis(x.reshape(moved[0].shape), -1, axis).reshape(shape) for x in results]


def _sort(operands: Sequence[Any], num_keys: int, *, stable: bool = True) -> list[Any]:
    """Sorts rows. Stability matters only if different elements compare equal."""
    return list(lax.sort(tuple(operands), dimension=1, is_stable=stable, num_keys=num_keys))


def _together(shards: Shards, operands: list[Any], n: int, num_keys: int, atoms: Atoms) -> list[Any]:
    size, parts = operands[0].shape[1], shards.mesh.count(atoms)
    gathered = _in_one_message(operands, lambda x: shards.all_gather(x, 1, atoms))
    whole = _sort([x[:, :n] for x in gathered], num_keys)
    start = lax.axis_index(atoms) * size
    return [lax.dynamic_slice_in_dim(_longer(x, parts * size), start, size, axis=1) for x in whole]


def _crosswise(shards: Shards, operands: list[Any], n: int, num_keys: int, atoms: Atoms) -> list[Any]:
    """Splits the other dimensions instead, merged to one and padded to equal parts."""
    others, size = operands[0].shape
    parts = shards.mesh.count(atoms)
    missing = -others % parts
    # Rows are split, so each array is sent separately.
    there = [_all_to_all(shards, jnp.pad(x, ((0, missing), (0, 0))), atoms, 0, 1)[:, :n] for x in operands]
    back = [_all_to_all(shards, _longer(x, parts * size), atoms, 1, 0) for x in _sort(there, num_keys)]
    return [x[:others] for x in back]


def _columns(shards: Shards, operands: list[Any], n: int, num_keys: int, atoms: Atoms) -> list[Any]:
    columns = Columns(n, shards.mesh.count(atoms))
    size, rows, parts = columns.size, columns.rows, columns.parts
    part = lax.axis_index(atoms)
    twins = are_twins([x.dtype for x in operands], num_keys)

    def valid(j: Any) -> Any:
        return jnp.clip(n - j * size, 0, size)

    # Sort padding last: by an additional key, or, for twins, by filling it with the greatest element.
    index = lax.broadcasted_iota(jnp.int32, operands[0].shape, 1)
    if not columns.padded:
        columned = _sort(operands, num_keys, stable=not twins)
    elif twins:
        most = [jnp.asarray(identity("min", x.dtype), x.dtype) for x in operands]
        columned = [jnp.where(index < valid(part), x, m) for x, m in zip(operands, most, strict=True)]
        columned = [_longer(x, rows, m) for x, m in zip(_sort(columned, num_keys, stable=False), most, strict=True)]
    else:
        columned = [_longer(x, rows) for x in _sort([index >= valid(part), *operands], num_keys + 1)[1:]]
    columned = _in_one_message(columned, lambda x: _all_to_all(shards, _dealt(x, parts), atoms, 1, 1))
    if twins:
        arranged, keys = columned, num_keys
    else:
        arranged, keys = _numbered(columned, num_keys, columns, part, valid), num_keys + 1
    arranged = _total(arranged, keys, columns, twins)
    arranged = _in_one_message(arranged, lambda x: _all_to_all(shards, x, atoms, 1, 1))
    arranged = _merged(shards, _total(arranged, keys, columns, twins), keys, columns, twins, atoms)
    result = arranged if twins else [*arranged[:num_keys], *arranged[num_keys + 1 :]]
    if rows == size:
        return result
    return _in_one_message(result, lambda x: shards.window(x, 1, atoms, columns.windows[2], 0))


def _dealt(x: Any, parts: int) -> Any:
    """Element ``k`` moves into chunk ``k % parts``."""
    return x.reshape(x.shape[0], -1, parts).swapaxes(1, 2).reshape(x.shape)


def _numbered(operands: list[Any], num_keys: int, columns: Columns, part: Any, valid: Any) -> list[Any]:
    """Inserts the number of each element behind the keys: its first column and its rank there; padding comes last.

    Among equal elements, numbers increase with the position in the unsorted array. Each device can compute them,
    because the origin of each element is known.
    """
    index = lax.broadcasted_iota(jnp.int32, operands[0].shape, 1)
    each = columns.rows // columns.parts
    source, rank = index // each, index % each * columns.parts + part
    number = source * columns.rows + rank
    if columns.padded:
        number = jnp.where(rank < valid(source), number, columns.rows * columns.parts)
    return [*operands[:num_keys], number.astype(columns.number_dtype), *operands[num_keys:]]


def _total(arranged: list[Any], keys: int, columns: Columns, twins: bool) -> list[Any]:
    """Sorts columns by keys, then by number, with padding last."""
    if twins or not columns.padded:
        return _sort(arranged, keys, stable=False)
    number = arranged[keys - 1]
    return _sort([number == columns.rows * columns.parts, *arranged], keys + 1, stable=False)[1:]


def _merged(shards: Shards, arranged: list[Any], keys: int, columns: Columns, twins: bool, atoms: Atoms) -> list[Any]:
    """Merges the ends of neighbouring columns, on both sides of each border."""
    border, part = columns.border, lax.axis_index(atoms)
    before, after, _ = columns.windows
    tops, bottoms = [x[:, :border] for x in arranged], [x[:, columns.rows - border :] for x in arranged]
    above = _in_one_message(arranged, lambda x: shards.window(x, 1, atoms, before, 0))
    below = _in_one_message(arranged, lambda x: shards.window(x, 1, atoms, after, 0))
    upper = _total([jnp.concatenate(pair, 1) for pair in zip(above, tops)], keys, columns, twins)
    lower = _total([jnp.concatenate(pair, 1) for pair in zip(bottoms, below)], keys, columns, twins)
    result = []
    for x, top, bottom, up, low in zip(arranged, tops, bottoms, upper, lower, strict=True):
        first = jnp.where(part == 0, top, up[:, border:])
        last = jnp.where(part == columns.parts - 1, bottom, low[:, :border])
        result.append(jnp.concatenate([first, x[:, border : columns.rows - border], last], 1))
    return result


def _in_one_message(arrays: Sequence[Any], move: Callable[[Any], Any]) -> list[Any]:
    """Moves several arrays in one message, as rows of words whose size divides all element sizes."""
    sizes = [x.dtype.itemsize for x in arrays]
    if len(arrays) == 1 or any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in arrays):
        return [move(x) for x in arrays]
    word = jnp.dtype(f"uint{8 * min(math.gcd(*sizes), 4)}")
    rows = arrays[0].shape[0]

    def as_words(x: Any) -> Any:
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        words = lax.bitcast_convert_type(x, word)
        return words if words.ndim == 2 else jnp.moveaxis(words, 2, 0).reshape(-1, x.shape[1])

    moved = move(jnp.concatenate([as_words(x) for x in arrays]))
    results, first_row = [], 0
    for x, size in zip(arrays, sizes, strict=True):
        count = size // word.itemsize
        words = moved[first_row : first_row + count * rows].reshape(count, rows, -1)
        first_row += count * rows
        words = words[0] if count == 1 else jnp.moveaxis(words, 0, 2)
        back = lax.bitcast_convert_type(words, jnp.uint8 if x.dtype == jnp.bool_ else x.dtype)
        results.append(back.astype(x.dtype))
    return results


def _longer(x: Any, size: int, fill: Any = 0) -> Any:
    return x if x.shape[1] == size else jnp.pad(x, ((0, 0), (0, size - x.shape[1])), constant_values=fill)


@in_context(NO_CONTEXT)
def _all_to_all(shards: Shards, x: Any, atoms: Atoms, split: int, concat: int) -> Any:
    parts = shards.mesh.count(atoms)
    if shards.note is not None:
        shards.note(ALL_TO_ALL, atoms, x.size * x.dtype.itemsize * (parts - 1) // parts, x)
    return all_to_all(x, atoms, split, concat)


@rule("sort", same_on_parts=True)
def sort(call: Call) -> Rule:
    """Shards exchange elements along the sorted dimension, with the algorithm that sends least.

    >>> print(sort(Call("sort", {"dimension": 1, "num_keys": 1}, ((4, 6), (4, 6)), ((4, 6), (4, 6)), ("f", "i"))))
    a b, a b -> a b, a b; communicate b

    A sort of shards is always stable.
    """
    axis, num_keys = call.params["dimension"], call.params["num_keys"]
    shape = call.in_shapes[0]
    make = RuleMaker()
    on_keys = any(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) for dtype in call.in_dtypes)
    array = AlongAxis.of(make, shape, axis, make.replicate if on_keys else make.communicate)

    def local(shards: Shards, *operands: Any) -> list[Any]:
        atoms = array.atoms(shards)
        if not atoms or not operands[0].size:
            return shards.bind(*operands)
        return sort_split(shards, operands, axis, shape[axis], num_keys, atoms)

    def sends(mesh: Mesh, split: Split) -> int:
        parts, others = array.parts(mesh, split), array.others(mesh, split)
        if parts == 1 or not shape[axis] * others:
            return 0
        sizes = [itemsize(dtype) for dtype in call.in_dtypes]
        return min(ways(shape[axis], parts, others, sizes, num_keys, are_twins(call.in_dtypes, num_keys)).values())

    comparisons = max(shape[axis], 1).bit_length()
    flops = math.prod(shape) * comparisons
    operands = [array.dims for _ in call.in_shapes]
    return make.rule(operands, operands, local=local, sends=None if on_keys else sends, flops=flops)


@rule("top_k")
def top_k(call: Call) -> Rule:
    """Each shard finds its k largest elements and their positions. The k largest of these are the result.

    >>> print(top_k(Call("top_k", {"k": 2, "operand": None}, ((4, 6),), ((4, 2), (4, 2)), ("f4",))))
    a b -> a c, a c; communicate b; replicate c
    """
    (shape,) = call.in_shapes
    axis, k = call.params.get("axis", -1) % len(shape), call.params["k"]
    make = RuleMaker()
    operand = AlongAxis.of(make, shape, axis)
    result = operand.replaced(make.replicate(k))

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = operand.atoms(shards)
        if not atoms or not k:
            return shards.bind(x)
        # Negative NaN is the last in JAX's order. Equal elements keep the order of their positions, so padding is last.
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        x = operand.fill_padding(shards, x, -np.nan if is_inexact else identity("max", x.dtype))
        values, positions = shards.bind(x, k=min(k, x.shape[axis]))
        positions = positions + jnp.asarray(shards.offset(operand.dim), positions.dtype)
        best, candidates = shards.bind(shards.all_gather(values, axis, atoms))
        if 1 in shards.unread:
            return [best, candidates]
        positions = shards.all_gather(positions, axis, atoms)
        return [best, jnp.take_along_axis(positions, candidates, axis)]

    sends = operand.gather_bytes((call.in_dtypes[0], jnp.int32), k)
    return make.rule([operand.dims], [result for _ in call.out_shapes], local=local, sends=sends)


@rule("approx_top_k")
def approx_top_k(call: Call) -> Rule:
    """Each shard finds its k best elements, with the recall of the whole. The best of these are the result.

    >>> params = {"k": 2, "reduction_dimension": -1, "aggregate_to_topk": True, "is_max_k": True}
    >>> print(approx_top_k(Call("approx_top_k", params, ((4, 6),), ((4, 2), (4, 2)), ("f4",))))
    a b -> a c, a c; communicate b; replicate c

    The values have at least the requested recall, and are exact where the operator is exact (on CPU). The operator does
    not define the order of equal values and of NaN. Here positions are valid and distinct, and NaN is the best value.
    The size of a result that is not reduced to k elements depends on the size of the whole dimension, so gshard does
    not split this dimension.
    """
    (shape,), p = call.in_shapes, call.params
    axis, k = p["reduction_dimension"] % len(shape), p["k"]
    make = RuleMaker()
    operand = AlongAxis.of(make, shape, axis, make.communicate if p["aggregate_to_topk"] else make.replicate)
    results = [operand.replaced(make.replicate(call.out_shapes[0][axis]))] * len(call.out_shapes)
    if not p["aggregate_to_topk"]:
        return make.rule([operand.dims], results)

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = operand.atoms(shards)
        if not atoms:
            return shards.bind(x)
        size, n = x.shape[axis], shape[axis]
        candidates = min(k, size)
        start = lax.axis_index(atoms) * size
        if n % shards.mesh.count(atoms):
            positions = start + lax.broadcasted_iota(jnp.int32, x.shape, axis)
            values, positions = _best(x, positions, positions >= n, axis, candidates, p["is_max_k"])
        else:
            override = p["reduction_input_size_override"]
            input_size = override if override > 0 else n
            values, positions = shards.bind(x, k=candidates, reduction_input_size_override=input_size)
            positions = positions + start
        values, positions = shards.all_gather(values, axis, atoms), shards.all_gather(positions, axis, atoms)
        return _best(values, positions, positions >= n, axis, k, p["is_max_k"])

    sends = operand.gather_bytes((call.in_dtypes[0], jnp.int32), k)
    return make.rule([operand.dims], results, local=local, sends=sends)


def _best(values: Any, positions: Any, is_padding: Any, axis: int, k: int, largest: bool) -> list[Any]:
    """The k best values and their positions, in order; the first of equal values, and padding after all values."""
    key = -values if largest else values
    operands = (is_padding, ~jnp.isnan(values), key, values, positions)
    _, _, _, values, positions = lax.sort(operands, dimension=axis, is_stable=True, num_keys=3)
    return [lax.slice_in_dim(x, 0, k, axis=axis) for x in (values, positions)]
