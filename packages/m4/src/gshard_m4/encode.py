"""Vocabularies learnt from the training text, and the parts as their ids; ten million pairs pass by in blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gshard_m4.corpus.pair import Pair, rows
from gshard_m4.encoded import Ids, write
from gshard_m4.prepare_config import TIERS, PrepareConfig
from gshard_m4.tokens import Vocabulary, learn

_BLOCK = 50_000
_FEW = 1000


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a part, one after the other."""
    return (Pair(*cells) for cells in rows(path))


def learn_source(train: Path, counts: Mapping[str, int], config: PrepareConfig) -> Vocabulary:
    """The vocabulary of all source languages, from a sample that has rare languages more often than the text.

    Args:
        train: the training pairs, by language.
        counts: language -> pairs, in the order of the file.
        config: the size, and how languages are sampled: by the number of pairs to the power of one over the
            temperature.
    """
    size, default = config.source_vocabulary, TIERS[config.tier].source_vocabulary
    total = sum(counts.values())
    if total <= _FEW:
        return learn((pair.foreign for pair in read_pairs(train)), size, default, "source")
    rng = np.random.default_rng(config.sampling_seed)
    weight = np.array([n ** (1 / config.settings["temperature"]) if n else 0.0 for n in counts.values()])
    wanted = rng.multinomial(min(total, TIERS[config.tier].vocabulary_sentences), weight / weight.sum())
    times = {name: np.bincount(rng.integers(0, n, k), minlength=n) if n else np.zeros(0, np.int64)
             for (name, n), k in zip(counts.items(), wanted, strict=True)}  # fmt: skip
    return learn(_repeated(train, times), size, default, "source")


def _repeated(train: Path, times: Mapping[str, np.ndarray]) -> Iterator[str]:
    for language, pairs in itertools.groupby(read_pairs(train), key=lambda pair: pair.language):
        for pair, count in zip(pairs, times[language], strict=True):
            yield from itertools.repeat(pair.foreign, int(count))


def learn_target(train: Path, config: PrepareConfig) -> Vocabulary:
    """The vocabulary of English, from every sentence once."""
    default = TIERS[config.tier].target_vocabulary
    return learn(dict.fromkeys(pair.english for pair in read_pairs(train)), config.target_vocabulary, default, "target")


def encode(part: Path, folder: Path, source: Vocabulary, target: Vocabulary, progress: Callable[[int], None]) -> None:
    """Writes the ids of a part's pairs.

    Args:
        part: the pairs.
        folder: where they are written, see `gshard_m4.encoded`; must not exist.
        source, target: vocabularies.
        progress: takes the number of pairs that are done.
    """
    languages = sorted({pair.language for pair in read_pairs(part)})
    number = {name: i for i, name in enumerate(languages)}
    pairs = read_pairs(part)
    known: dict[str, np.ndarray] = {}  # one English sentence has translations into many languages

    def blocks() -> Iterator[tuple[Sequence[int], Sequence[Ids], Sequence[Ids]]]:
        done = 0
        while block := list(itertools.islice(pairs, _BLOCK)):
            new = list(dict.fromkeys(pair.english for pair in block if pair.english not in known))
            known.update((text, np.array(ids, np.int32)) for text, ids in zip(new, target.encode(new), strict=True))
            foreign = source.encode([pair.foreign for pair in block])
            yield [number[pair.language] for pair in block], foreign, [known[pair.english] for pair in block]
            done += len(block)
            progress(done)

    write(folder, languages, source.size, target.size, blocks())
