"""Part: the merged pairs written as training, dev and test text.

train.tsv                         language, foreign, English; by language, the largest first
dev.tsv test.tsv                  the same, with English that no training pair has
known_dev.tsv known_test.tsv      the same, with English that training pairs of other languages have
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gshard_m4.corpus import hold_out
from gshard_m4.corpus.known_english import KNOWN_DEV, KNOWN_TEST, choose
from gshard_m4.corpus.near_twins import NearTwins
from gshard_m4.corpus.pair import rows, writing
from gshard_m4.errors import CorpusError

GIVEN = "in your own dev or test text"
"""The part of what is left out, and the reason."""
NEEDED = (hold_out.TRAIN, hold_out.DEV, hold_out.TEST)
PARTS = (*NEEDED, KNOWN_DEV, KNOWN_TEST)


@dataclasses.dataclass(frozen=True)
class Split:
    """How much is held out.

    Attributes:
        dev, test: shares of the English sentences, if there is no quota.
        quota: full sentences of every language for dev and for test; 0 holds out shares.
        known: sentences of every language for dev and for test whose English other languages keep; 0 for none.
        most: the most that a quota takes from a language, as a share of its full sentences.
        most_known: the most that is kept out for each part of known English, as a share of the language's sentences.
    """

    dev: float
    test: float
    quota: int
    known: int = 0
    most: float = 0.08
    most_known: float = 0.02


def write_parts(
    files: Mapping[str, Path],
    folder: Path,
    split: Split,
    aside: Path,
    given: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Any]:
    """Writes the parts, and tells what is in them.

    Args:
        files: language -> its pairs, a file of foreign and English sentences.
        folder: where the parts are written.
        split: how much is held out.
        aside: file for pairs that training leaves out, because the user's own dev or test text has their sentence.
        given: dev or test -> its pairs (language, foreign, English), instead of pairs that are held out.

    Raises:
        CorpusError: a part has not one sentence.
    """
    key_of: dict[str, str] = {}
    keys: dict[str, set[str]] = {}
    prose: dict[str, set[str]] = {}
    for language, path in files.items():
        own, full = keys.setdefault(language, set()), prose.setdefault(language, set())
        for _, english in rows(path):
            key = key_of.get(english)
            if key is None:
                key = key_of[english] = hold_out.key(english)
            own.add(key)
            if split.quota and key not in full and hold_out.is_prose(english):
                full.add(key)
    all_keys = dict.fromkeys(key_of.values())
    if split.quota:
        part_of = hold_out.parts_by_quota(all_keys, prose, split.quota, split.most)
    else:
        part_of = dict(hold_out.parts(all_keys, split.dev, split.test, keys))
    part_of = {key: part for key, part in part_of.items() if part not in given}
    part_of.update((key, GIVEN) for path in given.values() for key in _keys(path) if key in all_keys)
    training = {
        name: {key for key in own if part_of.get(key, hold_out.TRAIN) == hold_out.TRAIN} for name, own in keys.items()
    }
    candidates = {name: own & prose[name] for name, own in training.items()} if split.quota else training
    withheld = choose(files, key_of, candidates, training, split.known, split.most_known)
    parts = {name: part_of | own for name, own in withheld.items()}
    found = _write(files, folder, key_of, parts, aside)
    for part, path in given.items():
        shutil.copyfile(path, folder / f"{part}.tsv")
        languages = Counter(language for language, *_ in rows(path))
        found["pairs"][part] = languages.total()
        for row in found["distribution"]:
            row[part] = languages[row["language"]]
    for part in NEEDED:
        if not found["pairs"][part]:
            raise CorpusError(
                f"too little text: not one sentence for the {part} part.",
                got=f"{sum(found['pairs'].values()):,} pairs with {len(all_keys):,} different English sentences",
                hint="Give more text, hold out a larger share with --dev and --test, or give text for it with "
                f"--{part}-files.",
            )
    twins = 0
    if not split.quota or hold_out.TEST in given:  # a quota holds out no sentence that has one
        trained = NearTwins(key for key in all_keys if part_of.get(key, hold_out.TRAIN) == hold_out.TRAIN)
        twins = sum(map(trained.has, _keys(folder / f"{hold_out.TEST}.tsv")))
    return {**found, "english": len(all_keys), "near_twins": twins}


def _write(
    files: Mapping[str, Path],
    folder: Path,
    key_of: Mapping[str, str],
    parts: Mapping[str, Mapping[str, str]],
    aside: Path,
) -> dict[str, Any]:
    pairs = Counter[str](dict.fromkeys(PARTS, 0))
    table: list[dict[str, Any]] = []
    often, left_out = Counter[str](), 0
    with contextlib.ExitStack() as stack:
        open_ = {p: stack.enter_context(writing(folder / f"{p}.tsv")) for p in PARTS}
        secret = stack.enter_context(writing(aside))
        for language, path in files.items():
            counts, words = Counter[str](dict.fromkeys(PARTS, 0)), 0
            for foreign, english in rows(path):
                part = parts[language].get(key_of[english], hold_out.TRAIN)
                if part == GIVEN:
                    left_out += 1
                    secret.write(f"{GIVEN}\t{language}\t{foreign}\t{english}\n")
                    continue
                counts[part] += 1
                words += english.count(" ") + 1
                if part == hold_out.TRAIN:
                    often[english] += 1
                open_[part].write(f"{language}\t{foreign}\t{english}\n")
            table.append({"language": language, **counts, "english_words": words})
            pairs.update(counts)
    return {
        "pairs": dict(pairs),
        "distribution": sorted(table, key=lambda row: -sum(row[part] for part in PARTS)),
        "frequent_sentence": often.most_common(1)[0][0] if often else "",
        "kept_out": {GIVEN: left_out} if left_out else {},
    }


def _keys(path: Path) -> set[str]:
    """The keys of the English sentences of a part."""
    return {hold_out.key(english) for _, _, english in rows(path)}
