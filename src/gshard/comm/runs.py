"""Runs: whether the parts of an array are in one run of elements, or have to be copied into place."""

from __future__ import annotations


def is_strided(shape: tuple[int, ...], dim: int) -> bool:
    """Whether a part of an array along a dimension is more than one run of elements."""
    return any(n > 1 for n in shape[:dim])


def is_turned(shape: tuple[int, ...], cut: int, joined: int) -> bool:
    """Whether parts that come in a row are not in place: cut along one dimension, joined along another.

    Args:
        shape: of a part.
        cut, joined: the dimensions.
    """
    return any(n > 1 for n in shape[min(cut, joined) : max(cut, joined)])
