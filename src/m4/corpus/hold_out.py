"""Hold out: sentences that training never sees, in any language.

The English side is shared: one sentence has translations in dozens of languages, so a random split of pairs would
leak nearly everything. Pairs are therefore split by the *key* of their English sentence: lower case, without digits,
punctuation and placeholders. Which part a key belongs to is decided by its hash, so it is the same for everybody;
only where that leaves a small language without test sentences, some more of its keys are taken, in the order of their
hashes.

    >>> key("Delete %(count)s files?"), key("Delete 3 files")
    ('delete files', 'delete files')
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from m4.corpus.clean import words

TRAIN, DEV, TEST = "train", "dev", "test"
LEAST = 5
"""Test sentences that every language should have."""

_GRAM = 3


def key(english: str) -> str:
    """What two English sentences must differ in to be different."""
    return " ".join(word.lower() for word in words(english))


def parts(
    keys: Iterable[str], dev: float, test: float, by_language: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Mapping[str, str]:
    """The part of each key.

    A key of at least four words is held out only if no other key has half of its runs of three words: its near twin
    would be in the training text.

    Args:
        keys: of all English sentences.
        dev, test: share of keys held out for each.
        by_language: the keys of each language. A language gets at least `LEAST` keys for the test, if that is not
            more than a tenth of what it has.
    """
    unique = sorted(set(keys))
    grams = {k: _grams(k) for k in unique}
    users: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for k, own in grams.items():
        for gram in own:
            users[gram].append(k)
    found = {}
    place = {k: int.from_bytes(hashlib.blake2b(k.encode(), digest_size=8).digest()) / 2**64 for k in unique}
    for k, at in place.items():
        part = TEST if at < test else DEV if at < test + dev else TRAIN
        found[k] = TRAIN if part != TRAIN and _has_twin(k, grams[k], users) else part
    for known in sorted(by_language.values(), key=lambda known: (len(known), min(known, default=""))):
        wanted = min(LEAST, len(known) // 10) - sum(found[k] == TEST for k in known)
        for k in sorted(known, key=lambda k: place[k]):
            if wanted <= 0:
                break
            if found[k] == TRAIN and not _has_twin(k, grams[k], users):
                found[k] = TEST
                wanted -= 1
    return found


def _grams(k: str) -> set[tuple[str, ...]]:
    w = k.split()
    return {tuple(w[i : i + _GRAM]) for i in range(len(w) - _GRAM + 1)} if len(w) > _GRAM else set()


def _has_twin(k: str, own: set[tuple[str, ...]], users: Mapping[tuple[str, ...], list[str]]) -> bool:
    shared: dict[str, int] = defaultdict(int)
    for gram in own:
        for other in users[gram]:
            if other != k:
                shared[other] += 1
    return bool(own) and max(shared.values(), default=0) * 2 >= len(own)
