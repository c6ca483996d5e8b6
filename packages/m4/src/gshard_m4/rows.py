"""Rows: the part of a batch that a process has drawn, in place of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class OwnRows:
    """An array. This process holds some of its rows, and makes the whole array only if a reader needs other rows.

    Args:
        own: the rows that are there.
        first: the place of the first of them.
        rows: the number of rows of the whole.
        whole: makes the whole array.

    Attributes:
        shape, dtype: those of the whole.

    >>> part = OwnRows(np.array([[4, 5], [6, 7]]), 2, 6, lambda: np.arange(12).reshape(6, 2))
    >>> part.shape, part[3:4, :].tolist(), part[0:6, 1:].ravel().tolist()
    ((6, 2), [[6, 7]], [1, 3, 5, 7, 9, 11])
    """

    def __init__(self, own: np.ndarray, first: int, rows: int, whole: Callable[[], np.ndarray]):
        self._own, self._first, self._whole = own, first, whole
        self.shape, self.dtype = (rows, *own.shape[1:]), own.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        begin, end, _ = index[0].indices(len(self))
        if self._first <= begin and end <= self._first + len(self._own):
            return self._own[(slice(begin - self._first, end - self._first), *index[1:])]
        return np.asarray(self._whole()[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._whole(), dtype)
