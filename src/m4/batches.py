"""Batches: which sentences are trained on in which step, as a function of the seed and the step alone.

Languages are drawn with probability proportional to their size to the power 1/T (T = 1 is the natural imbalance,
larger T draws rare languages more often). Sentences are kept in buckets by length, so that little of a batch is
padding: a batch is drawn from one bucket and has its shape, one of a few with about the same number of tokens. How
often each bucket is drawn, and which languages from it, is such that every sentence of a language is drawn equally
often, short or long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from m4.encoded import Encoded
from m4.errors import CorpusError

__all__ = ["EOS", "PAD", "Batches", "Encoded", "in_order", "pad", "shapes"]

PAD, EOS = 0, 1
_MOST_SHAPES = 4  # each one is compiled
_SHORTEST = 12


def shapes(tokens: int, length: int) -> tuple[tuple[int, int], ...]:
    """Shapes (rows, tokens of a row) of batches of ``tokens`` tokens: the whole length, the half, and so on.

    >>> shapes(3072, 24)
    ((256, 12), (128, 24))
    >>> shapes(8192, 128)
    ((512, 16), (256, 32), (128, 64), (64, 128))
    """
    found = [(tokens // length, length)]
    while len(found) < _MOST_SHAPES:
        short, odd = divmod(found[0][1], 2)
        if odd or short < _SHORTEST or tokens % short:
            break
        found.insert(0, (tokens // short, short))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Batches:
    """Training batches.

    Attributes:
        data: the pairs.
        tokens: tokens of a batch on each side.
        length: the longest sentence, end included; longer pairs are never drawn.
        temperature: T.
        seed: of all choices.

    Raises:
        CorpusError: no pair is short enough.
    """

    data: Encoded
    tokens: int
    length: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        sizes = shapes(self.tokens, self.length)
        rows = np.array([rows for rows, _ in sizes])
        bucket = np.searchsorted([length for _, length in sizes], self.data.lengths).astype(np.int32)
        # One number for bucket and language; pairs that are too long come last and are cut off.
        languages = len(self.data.languages)
        cell = bucket * languages + np.asarray(self.data.language)
        fitting = int((bucket < len(sizes)).sum())
        if not fitting:
            raise CorpusError(
                f"no pair of sentences fits into {self.length} tokens.",
                got=f"{len(self.data):,} pairs",
                way_out="Prepare again with a larger --length, or give shorter sentences.",
            )
        counts = np.bincount(cell, minlength=len(sizes) * languages)[: len(sizes) * languages]
        counts_BL = counts.reshape(len(sizes), languages).astype(np.float64)
        total_L = counts_BL.sum(0)
        weight_L = np.where(total_L > 0, np.maximum(total_L, 1) ** (1 / self.temperature), 0.0)
        share_BL = counts_BL / np.maximum(total_L, 1) * weight_L
        # A batch of short sentences holds more of them, and is drawn the less often.
        often_B = share_BL.sum(1) / rows
        object.__setattr__(self, "_order", np.argsort(cell, kind="stable")[:fitting].astype(np.int32))
        object.__setattr__(self, "_first", np.concatenate([[0], np.cumsum(counts)]))
        object.__setattr__(self, "_bucket_chance", np.cumsum(often_B / often_B.sum()))
        share_BL /= np.maximum(share_BL.sum(1, keepdims=True), 1e-300)
        object.__setattr__(self, "_language_chance", np.cumsum(share_BL, axis=1))

    @property
    def too_long(self) -> int:
        """Pairs that no batch can hold."""
        return len(self.data) - len(self._order)  # type: ignore[attr-defined]

    def batch(self, step: int, process: int = 0, processes: int = 1) -> dict[str, np.ndarray]:
        """The batch of a step: ``source`` and ``target``, int32 [B, L], ended by 1 and filled with 0.

        Args:
            step: counted from 0.
            process, processes: reads only the part of this one of so many processes: B/processes rows, such that the
                parts of all of them in order are the whole batch.

        Raises:
            CorpusError: the rows cannot be divided by the processes.
        """
        rows, length = self._draw(step)
        if len(rows) % processes:
            raise CorpusError(
                f"a batch of {len(rows)} sentences of {length} tokens cannot be divided by {processes} processes.",
                way_out=f"Let a batch have {processes} times {self.length} tokens, or a multiple of that.",
            )
        own = len(rows) // processes
        return pad(self.data, rows[process * own : (process + 1) * own], length)

    def _draw(self, step: int) -> tuple[np.ndarray, int]:
        """Pairs of a batch, and its length."""
        order, first = self._order, self._first  # type: ignore[attr-defined]
        bucket_chance, language_chance = self._bucket_chance, self._language_chance  # type: ignore[attr-defined]
        rng = np.random.default_rng((self.seed, step))
        bucket = min(int(np.searchsorted(bucket_chance, rng.random(), side="right")), len(bucket_chance) - 1)
        count, length = shapes(self.tokens, self.length)[bucket]
        chance = language_chance[bucket]
        # Not beyond the last language of this bucket, whatever rounding did to the sum.
        language = np.searchsorted(chance, rng.random(count) * chance[-1], side="right").clip(0, len(chance) - 1)
        cell = bucket * len(chance) + language
        low, high = first[cell], first[cell + 1]
        return np.asarray(order[low + (rng.random(count) * (high - low)).astype(np.int64)], np.int64), length


def pad(data: Encoded, rows: Sequence[int] | np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Pairs as rows of ids, ended by 1 and filled with 0; -1 makes an empty row."""
    out = {}
    for side, ids, at in (("source", data.source, data.source_at), ("target", data.target, data.target_at)):
        block = np.full((len(rows), length), PAD, np.int32)
        for i, row in enumerate(rows):
            if row >= 0:
                own = ids[at[row] : at[row + 1]]
                block[i, : len(own)] = own
                block[i, len(own)] = EOS
        out[side] = block
    return out


def in_order(data: Encoded, rows: int, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Every pair that fits once, in batches of one shape, the last one filled with empty rows."""
    fitting = np.flatnonzero(data.lengths <= length)
    for start in range(0, len(fitting), rows):
        chosen = fitting[start : start + rows]
        yield pad(data, np.concatenate([chosen, np.full(rows - len(chosen), -1)]), length)
