"""Batches: which sentences are trained on in which step, as a function of the seed and the step alone.

Languages are drawn with probability proportional to their size to the power 1/T (T = 1 is the natural imbalance,
larger T draws rare languages more often), and every sentence of a language equally often, short or long. Several
sentences are packed into each row (`gshard_m4.packing`), so that little of a batch is padding, and every batch has the
same shape. Where one side of the text has more tokens than the other, its rows are longer.

Some sources begin with a token that names their language: so a model can be told the language, and need not be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from gshard_m4.encoded import Encoded
from gshard_m4.errors import CorpusError
from gshard_m4.packing import fill

__all__ = ["EOS", "PAD", "TAGGED", "Batches", "Encoded", "Shape", "check_temperature", "in_order"]

PAD, EOS = 0, 1
TAGGED = 0.5
"""The share of sources that name their language."""

_BLOCK = 16  # rows that are drawn and packed by themselves, so that a process packs no more than its own
_LONGEST = 2.0  # the longer side's rows against the shorter's


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a batch: rows, and the source and target tokens of a row."""

    rows: int
    source: int
    target: int

    @staticmethod
    def of(tokens: int, length: int, source_to_target: float) -> Shape:
        """About ``tokens`` tokens on each side, in rows that hold any sentence of ``length`` tokens.

        Args:
            tokens: tokens of a batch, mean of both sides.
            length: the longest sentence.
            source_to_target: source tokens for each target token.

        >>> Shape.of(8192, 128, 1.5)
        Shape(rows=48, source=192, target=128)
        >>> Shape.of(3072, 24, 0.8)
        Shape(rows=104, source=24, target=32)
        """
        longer = max(source_to_target, 1 / source_to_target)
        wide = max(8 * round(length * min(longer, _LONGEST) / 8), length)
        rows = max(2 * tokens // (length + wide), 1)
        rows -= rows % 8 if rows > 8 else 0  # devices and processes share them out
        return Shape(rows, *((wide, length) if source_to_target >= 1 else (length, wide)))


def check_temperature(temperature: float) -> None:
    """Refuses a temperature that languages cannot be drawn with.

    Raises:
        CorpusError: it is below 1, infinite, or not a number.
    """
    if not 1 <= temperature < math.inf:
        raise CorpusError(
            f"languages cannot be drawn with a temperature of {temperature:g}.",
            where="--temperature",
            hint="Give 1, which draws languages as often as they occur, or more, which draws rare ones more often.",
        )


@dataclasses.dataclass(frozen=True)
class Batches:
    """Training batches.

    Attributes:
        data: the pairs.
        tokens: tokens of a batch, mean of both sides.
        length: the longest sentence, end included; longer pairs are never drawn.
        temperature: T.
        seed: of all choices.
        tags: for each language of the data the source id that names it; empty if none are to be named.
        shape: of every batch.

    Raises:
        CorpusError: no pair is short enough.
    """

    data: Encoded
    tokens: int
    length: int
    temperature: float
    seed: int
    tags: tuple[int, ...] = ()
    shape: Shape = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        source_N, target_N = np.diff(self.data.source_at) + 1, np.diff(self.data.target_at) + 1
        fitting = np.flatnonzero(np.maximum(source_N, target_N) <= self.length)
        if not len(fitting):
            raise CorpusError(
                f"no pair of sentences fits into {self.length} tokens.",
                got=f"{len(self.data):,} pairs",
                hint="Prepare again with a larger --length, or give shorter sentences.",
            )
        language = np.asarray(self.data.language)[fitting]
        count_L = np.bincount(language, minlength=len(self.data.languages))
        weight_L = np.where(count_L > 0, np.maximum(count_L, 1) ** (1 / self.temperature), 0.0)
        weight_L /= weight_L.sum()

        def drawn_mean(length_N: np.ndarray) -> float:
            total_L = np.bincount(language, weights=length_N[fitting], minlength=len(count_L))
            return float((total_L / np.maximum(count_L, 1)) @ weight_L)

        mean = drawn_mean(source_N) + (TAGGED if self.tags else 0.0), drawn_mean(target_N)
        shape = Shape.of(self.tokens, self.length, mean[0] / mean[1])
        # Somewhat more than are expected to fit, so that rows are filled by what was drawn first.
        most = min(shape.source / mean[0], shape.target / mean[1])
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "_of_a_row", 1.25 * most)
        object.__setattr__(self, "_order", fitting[np.argsort(language, kind="stable")].astype(np.int32))
        object.__setattr__(self, "_first", np.concatenate([[0], np.cumsum(count_L)]))
        object.__setattr__(self, "_chance", np.cumsum(weight_L))

    def batch(self, step: int, process: int = 0, processes: int = 1) -> dict[str, np.ndarray]:
        """The batch of a step: ``source`` and ``target``, int32 [B, L], each sentence ended by 1, filled with 0.

        The n-th source of a row belongs to its n-th target.

        Args:
            step: counted from 0.
            process, processes: reads only the part of this one of so many processes: rows p B / n to (p + 1) B / n,
                rounded down, so that the parts of all of them in order are the whole batch.
        """
        rows = self.shape.rows
        first, end = process * rows // processes, (process + 1) * rows // processes
        blocks = [self._block(step, block) for block in range(first // _BLOCK, max(end - 1, first) // _BLOCK + 1)]
        skipped = first // _BLOCK * _BLOCK
        return {
            side: np.concatenate([block[side] for block in blocks])[first - skipped : end - skipped]
            for side in ("source", "target")
        }

    def _block(self, step: int, block: int) -> dict[str, np.ndarray]:
        """Some rows of a batch."""
        rows = min(_BLOCK, self.shape.rows - block * _BLOCK)
        order, first, chance = self._order, self._first, self._chance  # type: ignore[attr-defined]
        rng = np.random.default_rng((self.seed, step, block))
        count = int(rows * self._of_a_row) + 16  # type: ignore[attr-defined]
        # Not beyond the last language, whatever rounding did to the sum.
        language = np.searchsorted(chance, rng.random(count) * chance[-1], side="right").clip(0, len(chance) - 1)
        low, high = first[language], first[language + 1]
        pairs = order[low + (rng.random(count) * (high - low)).astype(np.int64)].astype(np.int64)
        tags = np.full(count, PAD)
        if self.tags:
            tags = np.where(rng.random(count) < TAGGED, np.array(self.tags)[language], PAD)
        lengths_N2, tags = _lengths(self.data, pairs, tags, self.shape)
        row = fill(lengths_N2, rows, (self.shape.source, self.shape.target))
        return _rows(self.data, pairs[: len(row)], tags[: len(row)], row, rows, self.shape)


def in_order(data: Encoded, shape: Shape, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Every pair of at most ``length`` tokens once, in batches of one shape, the last ones not full; no tags."""
    pairs = np.flatnonzero(data.lengths <= length)
    while len(pairs):
        some = pairs[: shape.rows * min(shape.source, shape.target)]
        lengths_N2, tags = _lengths(data, some, np.full(len(some), PAD), shape)
        row = fill(lengths_N2, shape.rows, (shape.source, shape.target))
        yield _rows(data, pairs[: len(row)], tags, row, shape.rows, shape)
        pairs = pairs[len(row) :]


def _lengths(data: Encoded, pairs: np.ndarray, tags: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each pair on both sides, and the tags for which there is room."""
    source_N = data.source_at[pairs + 1] - data.source_at[pairs] + 1
    target_N = data.target_at[pairs + 1] - data.target_at[pairs] + 1
    tags = np.where(source_N < shape.source, tags, PAD)
    return np.stack([source_N + (tags != PAD), target_N], axis=1), tags


def _rows(
    data: Encoded, pairs: Sequence[int] | np.ndarray, tags: np.ndarray, row_N: np.ndarray, rows: int, shape: Shape
) -> dict[str, np.ndarray]:
    """Pairs in their rows, one after the other."""
    out = {}
    for side, ids, at, length in (
        ("source", data.source, data.source_at, shape.source),
        ("target", data.target, data.target_at, shape.target),
    ):
        block = np.full((rows, length), PAD, np.int32)
        free = [0] * rows
        for pair, tag, row in zip(pairs, tags, row_N, strict=False):
            own = ids[at[pair] : at[pair + 1]]
            begin = free[row]
            if side == "source" and tag != PAD:
                block[row, begin] = tag
                begin += 1
            end = begin + len(own)
            block[row, begin:end] = own
            block[row, end] = EOS
            free[row] = end + 1
        out[side] = block
    return out
