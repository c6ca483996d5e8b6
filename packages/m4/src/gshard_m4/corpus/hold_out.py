"""Hold out: sentences that training never sees, in any language.

The English side is shared: one sentence has translations in dozens of languages, so a random split of pairs would
leak nearly everything. Pairs are therefore split by the *key* of their English sentence: lower case, without digits,
punctuation and placeholders. Which part a key belongs to is decided by its hash, so it is the same for everybody.

A small corpus holds out a share of its keys (`parts`); only where that leaves a small language without test sentences,
some more of its keys are taken, in the order of their hashes. A large one holds out as many full sentences as every
language needs to be scored (`parts_by_quota`).

    >>> key("Delete %(count)s files?"), key("Delete 3 files")
    ('delete files', 'delete files')
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from gshard_m4.corpus.clean import words
from gshard_m4.corpus.near_twins import NearTwins

TRAIN, DEV, TEST = "train", "dev", "test"
LEAST = 5
"""Test sentences that every language should have."""

SCARCE = 0.1
"""Share of what a part should have, below which near twins are held out too."""

_GRAM = 3
_GRAM_OF_LARGE = 4
_DEEP = 4  # times its quota: keys of a language that are looked at
_PROSE_END = re.compile(r"[.!?…:;][\"”’)]?$")


def key(english: str) -> str:
    """What two English sentences must differ in to be different."""
    return " ".join(word.lower() for word in words(english))


def is_prose(english: str) -> bool:
    """Whether it is a full sentence: six words or more, a capital first, a full stop or the like last, no placeholder.

    >>> is_prose("The file could not be opened for writing."), is_prose("Open a file for writing")
    (True, False)
    """
    if not english[:1].isupper() or not _PROSE_END.search(english) or set(english) & set("%{$"):
        return False
    return len(words(english)) >= 6


def parts_by_quota(
    keys: Iterable[str], prose: Mapping[str, Collection[str]], quota: int, share: float
) -> dict[str, str]:
    """The held-out keys and their part, dev or test; all others are for training.

    Keys are taken in the order of their hashes while one of their languages has fewer than its quota in that part. A
    key is not held out if another one has half of its runs of four words or is its near twin
    (`gshard_m4.corpus.near_twins`), which would be in the training text.

    Args:
        keys: of all English sentences.
        prose: for each language that is to be scored, the keys of its full sentences.
        quota: held-out sentences a language needs in each part.
        share: the most that is taken from a language, as a share of its full sentences.
    """
    wanted = {name: min(quota, int(share * len(own))) for name, own in prose.items()}
    languages: dict[str, list[str]] = defaultdict(list)
    for name, own in prose.items():
        for k in sorted(own, key=_digest)[: 2 * _DEEP * wanted[name]]:
            languages[k].append(name)
    for name, own in prose.items():  # a key counts for all languages that have it
        for k in own:
            if k in languages and name not in languages[k]:
                languages[k].append(name)
    twins = _Twins({k: runs(k.split(), _GRAM_OF_LARGE) for k in languages}, list(keys), _GRAM_OF_LARGE)
    taken = {DEV: Counter[str](), TEST: Counter[str]()}
    found = {}
    for k in sorted(languages, key=_digest):
        part = TEST if _digest(k)[-1] & 1 else DEV
        if any(taken[part][name] < wanted[name] for name in languages[k]) and not twins.has(k):
            found[k] = part
            taken[part].update(languages[k])
    return found


def _digest(k: str) -> bytes:
    return hashlib.blake2b(k.encode(), digest_size=8).digest()


def runs(sentence: Sequence[str], length: int) -> set[str]:
    """Runs of so many words of a sentence; the whole where it has fewer."""
    found = {" ".join(sentence[i : i + length]) for i in range(len(sentence) - length + 1)}
    return found or {" ".join(sentence)}


class _Twins:
    """Keys that have another one with half of their runs of words, or a near twin.

    Args:
        asked: the keys that are asked for, with their runs.
        keys: all.
        length: words of a run.
    """

    def __init__(self, asked: Mapping[str, set[str]], keys: Collection[str], length: int):
        self._runs = asked
        self._users: dict[str, list[str]] = {run: [] for own in asked.values() for run in own}
        for k in keys:
            for run in asked[k] if k in asked else runs(k.split(), length):
                if run in self._users:
                    self._users[run].append(k)
        self._near = NearTwins(keys)

    def has(self, k: str) -> bool:
        """Whether a key has a twin."""
        own = self._runs[k]
        shared = Counter(other for run in own for other in self._users[run] if other != k)
        if shared and 2 * max(shared.values()) >= len(own):
            return True
        return self._near.has(k, besides_itself=True)


def parts(
    keys: Iterable[str], dev: float, test: float, by_language: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Mapping[str, str]:
    """The part of each key.

    A key is held out only if no other one has half of its runs of three words or is its near twin
    (`gshard_m4.corpus.near_twins`), which would be in the training text. Where nearly every key has one, as in
    sentences of one pattern, a part gets keys nevertheless: if it has less than `SCARCE` of its share, the next keys
    are taken as they come.

    Args:
        keys: of all English sentences.
        dev, test: share of keys held out for each.
        by_language: the keys of each language. A language gets at least `LEAST` keys for the test, if that is not
            more than a tenth of what it has.
    """
    unique = sorted(set(keys), key=_digest)
    # A sentence of so many words or fewer has no runs.
    twins = _Twins({k: runs(k.split(), _GRAM) if k.count(" ") >= _GRAM else set() for k in unique}, unique, _GRAM)
    found = dict.fromkeys(unique, TRAIN)
    # From both ends, so that a larger share keeps what a smaller one holds out; the part that is further behind next,
    # so that both get theirs of the few that have no twin.
    ends = {TEST: iter(unique), DEV: reversed(unique)}
    behind = {TEST: round(test * len(unique)), DEV: round(dev * len(unique))}
    whole = {part: max(count, 1) for part, count in behind.items()}
    while any(behind.values()):
        part = max(behind, key=lambda part: behind[part] / whole[part])
        free = next((k for k in ends[part] if found[k] == TRAIN and not twins.has(k)), None)
        if free is None:
            break
        found[free] = part
        behind[part] -= 1
    for part, order in ((TEST, unique), (DEV, unique[::-1])):
        if behind[part] > (1 - SCARCE) * whole[part]:
            for k in [k for k in order if found[k] == TRAIN][: behind[part]]:
                found[k] = part
    for known in sorted(by_language.values(), key=lambda known: (len(known), min(known, default=""))):
        wanted = min(LEAST, len(known) // 10) - sum(found[k] == TEST for k in known)
        for k in sorted(known, key=_digest):
            if wanted <= 0:
                break
            if found[k] == TRAIN and not twins.has(k):
                found[k] = TEST
                wanted -= 1
    return found
