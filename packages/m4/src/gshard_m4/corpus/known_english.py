"""Known English: pairs kept out of one language's training text whose English sentence stays in that of others.

What a multilingual model can do for a language with little text is to carry over what it has learnt from the others.
The test of `gshard_m4.corpus.hold_out` cannot show it: its English is in no training pair of any language. Here the
*pair* is new and its English is not: *Datei öffnen* is kept out of German, while French and Czech have *Open file*.

A pair that is kept out takes with it every pair of that language whose English is the same but for case, digits,
punctuation and placeholders. It is not kept out at all where training would still tell its translation by heart:

- another pair of the training text, in any language, has the same source (a close relative, a second catalogue);
- another pair of the same language has half of the runs of three words of its source, or, where that has only two
  words, these two one after the other.

Which pairs are kept out follows from hashes, so they are the same for everybody.

    >>> units("Fermer 3 fenêtres"), units("ファイル")
    (['fermer', 'fenêtres'], ['フ', 'ァ', 'イ', 'ル'])
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

from gshard_m4.corpus.clean import PLACEHOLDER
from gshard_m4.corpus.hold_out import DEV, TEST, runs
from gshard_m4.corpus.pair import rows

KNOWN_DEV, KNOWN_TEST = f"known_{DEV}", f"known_{TEST}"
OTHERS = 2
"""Languages that keep the English sentence of a pair that is kept out."""

_RUN = 3
_DEEP = 4  # times as many candidates as are wanted: some fall away
# Scripts that put no blanks between words; each of their letters counts as one.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNIT = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+")

Withheld = dict[str, dict[str, str]]
"""Language -> key of an English sentence -> the part that its pairs are kept for."""


def units(text: str) -> list[str]:
    """Words in lower case, placeholders and digits left out; letters where a script does not part words."""
    return [unit.lower() for unit in _UNIT.findall(PLACEHOLDER.sub(" ", text))]


def choose(
    files: Mapping[str, Path],
    key_of: Mapping[str, str],
    candidates: Mapping[str, Collection[str]],
    training: Mapping[str, Collection[str]],
    quota: int,
    share: float,
) -> Withheld:
    """The pairs to keep out.

    Args:
        files: language -> its pairs, a file of foreign and English sentences.
        key_of: English sentence -> key.
        candidates: language -> keys that may be kept out.
        training: language -> keys of its training text.
        quota: keys to keep out of each language for each part, dev and test.
        share: the most that is kept out for each part, as a share of the keys of the language.
    """
    wanted = {name: min(quota, int(share * len(own))) for name, own in training.items()}
    has = Counter(key for own in training.values() for key in own)
    asked = {
        name: heapq.nsmallest(
            2 * _DEEP * wanted[name], (k for k in candidates[name] if has[k] > OTHERS), key=lambda k: _place(name, k)
        )
        for name in training
    }
    if not any(asked.values()):
        return {name: {} for name in training}
    told = _told(files, key_of, {name: set(keys) for name, keys in asked.items()}, training)
    found: Withheld = {name: {} for name in training}
    for name, keys in asked.items():
        taken = {KNOWN_DEV: 0, KNOWN_TEST: 0}
        for key in keys:
            part = KNOWN_TEST if _place(name, key)[-1] & 1 else KNOWN_DEV
            if taken[part] < wanted[name] and has[key] > OTHERS and (name, key) not in told:
                found[name][key] = part
                taken[part] += 1
                has[key] -= 1
    return found


def _told(
    files: Mapping[str, Path],
    key_of: Mapping[str, str],
    asked: Mapping[str, Collection[str]],
    training: Mapping[str, Collection[str]],
) -> set[tuple[str, str]]:
    """Languages and keys whose translation is in another training pair."""
    users: dict[str, dict[str, list[tuple[str, int]]]] = {name: defaultdict(list) for name in files}
    same: dict[str, set[tuple[str, str]]] = defaultdict(set)
    owners: dict[str, list[tuple[str, set[str]]]] = {name: [] for name in files}
    for name, path in files.items():
        for foreign, english in rows(path):
            key = key_of[english]
            if key in asked[name]:
                source = units(foreign)
                same[" ".join(source)].add((name, key))
                own = runs(source, _RUN)
                for run in own:
                    users[name][run].append((key, len(owners[name])))
                owners[name].append((key, own))
    found: set[tuple[str, str]] = set()
    for name, path in files.items():
        own_runs, own_rows = users[name], owners[name]
        for foreign, english in rows(path):
            key = key_of[english]
            if key not in training[name]:
                continue
            source = units(foreign)
            found.update(pair for pair in same.get(" ".join(source), ()) if pair != (name, key))
            theirs = runs(source, _RUN) | runs(source, _RUN - 1)
            shared = Counter(row for run in theirs if run in own_runs for other, row in own_runs[run] if other != key)
            for row, count in shared.items():
                if 2 * count >= len(own_rows[row][1]):
                    found.add((name, own_rows[row][0]))
    return found


def _place(language: str, key: str) -> bytes:
    return hashlib.blake2b(f"{language}\t{key}".encode(), digest_size=8).digest()
