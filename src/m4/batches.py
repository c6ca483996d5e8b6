"""Batches: which sentences are trained on in which step, as a function of the seed and the step alone.

Languages are drawn with probability proportional to their size to the power 1/T (T = 1 is the natural imbalance,
larger T draws rare languages more often). Sentences that are drawn together are sorted by length and cut into batches
of a few shapes, all with about the same number of tokens, so that little of a batch is padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from m4.errors import CorpusError

PAD, EOS = 0, 1
_POOL = 16  # batches that are drawn together


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Sentence pairs as ids, one after the other.

    Attributes:
        languages: names.
        language: for each pair the number of its language.
        source, target: all ids of all pairs.
        source_at, target_at: where each pair's ids begin; one more entry than pairs.
    """

    languages: tuple[str, ...]
    language: np.ndarray
    source: np.ndarray
    target: np.ndarray
    source_at: np.ndarray
    target_at: np.ndarray

    def __len__(self) -> int:
        return len(self.language)

    @property
    def lengths(self) -> np.ndarray:
        """For each pair the longer side's ids, end included."""
        return np.maximum(np.diff(self.source_at), np.diff(self.target_at)) + 1


def shapes(tokens: int, length: int) -> tuple[tuple[int, int], ...]:
    """Shapes (rows, tokens of a row) of batches of ``tokens`` tokens: rows of half the length, and of the whole.

    >>> shapes(3072, 24)
    ((256, 12), (128, 24))
    """
    short = length // 2
    if short < 4 or tokens % short:
        return ((tokens // length, length),)
    return ((tokens // short, short), (tokens // length, length))


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
        fitting = np.flatnonzero(self.data.lengths <= self.length)
        if not len(fitting):
            raise CorpusError(
                f"no pair of sentences fits into {self.length} tokens.",
                got=f"{len(self.data):,} pairs",
                way_out="Prepare again with a larger --length, or give shorter sentences.",
            )
        order = fitting[np.argsort(self.data.language[fitting], kind="stable")]
        counts = np.bincount(self.data.language[order], minlength=len(self.data.languages))
        weights = np.where(counts > 0, counts.astype(np.float64) ** (1 / self.temperature), 0.0)
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_first", np.concatenate([[0], np.cumsum(counts)]))
        object.__setattr__(self, "_chance", np.cumsum(weights / max(weights.sum(), 1e-9)))

    @property
    def too_long(self) -> int:
        """Pairs that no batch can hold."""
        return len(self.data) - len(self._order)  # type: ignore[attr-defined]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step: ``source`` and ``target``, int32 [B, L], ended by 1 and filled with 0."""
        rows, length = self._plan(step // _POOL)[step % _POOL]
        return pad(self.data, rows, length)

    def _plan(self, pool: int) -> list[tuple[np.ndarray, int]]:
        """The batches of a pool: rows and row length of each, in random order."""
        rng = np.random.default_rng((self.seed, pool))
        sizes = shapes(self.tokens, self.length)
        drawn = self._draw(rng, _POOL * sizes[0][0])
        drawn = drawn[np.argsort(self.data.lengths[drawn], kind="stable")]
        short_rows, short = sizes[0]
        fits = int(np.searchsorted(self.data.lengths[drawn], short, side="right"))
        # As many short batches as there are short sentences for; the rest, and the longest ones, make long batches.
        count = min(fits // short_rows, _POOL) if len(sizes) > 1 else 0
        batches = [(drawn[i * short_rows : (i + 1) * short_rows], short) for i in range(count)]
        rows, length = sizes[-1]
        rest = rng.permutation(drawn[count * short_rows :])
        while len(rest) < (_POOL - count) * rows:
            rest = np.concatenate([rest, self._draw(rng, rows)])
        batches += [(rest[i * rows : (i + 1) * rows], length) for i in range(_POOL - count)]
        return [batches[i] for i in rng.permutation(_POOL)]

    def _draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        order, first, chance = self._order, self._first, self._chance  # type: ignore[attr-defined]
        language = np.searchsorted(chance, rng.random(count), side="right").clip(0, len(chance) - 1)
        low, high = first[language], first[language + 1]
        return np.asarray(order[low + (rng.random(count) * (high - low)).astype(np.int64)])


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
