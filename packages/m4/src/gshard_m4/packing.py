"""Packing: pairs of sentences of any length in rows of one length, several to a row, so that little is padding.

A row has room for so many source and so many target tokens, and a pair takes some of both. Pairs are placed from the
longest to the shortest, each into the first row that has room on both sides.

>>> lengths = np.array([[3, 2], [5, 4], [2, 2], [4, 3]])
>>> fill(lengths, rows=2, room=(8, 6)).tolist()
[0, 0, 1, 1]
"""

from __future__ import annotations

import numpy as np


def fill(lengths_N2: np.ndarray, rows: int, room: tuple[int, int]) -> np.ndarray:
    """The row of each of as many pairs as fit, from the first one on, int64 [n] with n <= N.

    No pair is passed over for one that comes later and is shorter, so what comes first is what is packed.

    Args:
        lengths_N2: source and target tokens of each pair, ends included.
        rows: number of rows.
        room: source and target tokens of a row.
    """
    total_N = np.cumsum(lengths_N2, axis=0)
    count = int(np.argmax(np.any(total_N > np.array(room) * rows, axis=1)))
    if not np.any(total_N[-1:] > np.array(room) * rows):
        count = len(lengths_N2)
    while count:
        row_N, left = _place(lengths_N2[:count], rows, room)
        if not left:
            return row_N
        count -= left
    return np.zeros(0, np.int64)


def _place(lengths_N2: np.ndarray, rows: int, room: tuple[int, int]) -> tuple[np.ndarray, int]:
    """The row of each pair, and how many found none."""
    free_R2 = np.tile(np.array(room), (rows, 1))
    row_N = np.full(len(lengths_N2), -1)
    left = 0
    for i in np.argsort(-np.max(lengths_N2 / np.array(room), axis=1), kind="stable"):
        fits_R = (free_R2 >= lengths_N2[i]).all(axis=1)
        row = int(np.argmax(fits_R))
        if fits_R[row]:
            row_N[i] = row
            free_R2[row] -= lengths_N2[i]
        else:
            left += 1
    return row_N, left
