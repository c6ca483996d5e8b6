"""Sorts along a split dimension with the least communication. All methods are stable.

    together    gathers all parts; each device keeps its part of the sorted whole
    crosswise   for arrays with other dimensions: an all-to-all makes the sorted dimension whole and splits the others,
                and a second one moves the parts back
    columns     Leighton's columnsort (IEEE Transactions on Computers, 1985): the bytes that each device sends do not
    grow
                with the number of devices

Columnsort of ``parts`` columns, one on each device, of ``rows`` elements each:

1. Sort each column, and distribute it: element ``k`` goes to column ``k % parts``.
2. Sort each column, and divide it into equal chunks: chunk ``j`` goes to column ``j``.
3. Sort each column. Elements at a wrong position are now close to the border of two columns.
4. Merge the ends of neighbouring columns.

Each exchange sends all operands in one message.

Proof. By the 0-1 principle it suffices to sort zeros and ones. After the first sort each column consists of zeros, then
ones. The distribution gives each column the same number of these zeros, or one more to the first columns. So after the
second sort column ``c`` begins with ``z[c]`` zeros, where ``z`` never increases and ``z[0] - z[parts - 1] <= parts``.
Step 2 puts the elements into the order across columns, row by row. In this order the first one is at
``z[c] * parts + c`` for some ``c``, and the last zero is at ``(z[d] - 1) * parts + d`` for some ``d``. If a one
precedes a zero then ``d < c``, so the range from the first one to the last zero has at most ``parts * (parts - 1)``
elements. Since columns are at least twice as long, this range is in one column, which step 3 sorts, or in the ends of
two columns, which step 4 sorts.

    >>> Columns(n=1000, parts=8)
    Columns(n=1000, parts=8)
    >>> Columns(n=1000, parts=8).rows, Columns(n=1000, parts=8).border
    (128, 56)
    >>> ways(1000, 8, 1, (4,), 1, False)
    {'together': 3500, 'crosswise': 7000, 'columns': 1876}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, identity
from gshard.comm.steps import ALL_TO_ALL
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms
from gshard.core.xla_workarounds import all_to_all


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
