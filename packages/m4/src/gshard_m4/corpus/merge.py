"""Merge: the pairs of all sources by language, each once.

One language after the other is held in memory. Left out are pairs that differ only in case or in the mark at the end,
translations of a sentence beyond the third, and *copies*: the same translation in a large language that is no relative
(a catalogue that falls back on Spanish where it has no translation).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gshard_m4.corpus.extract import SAME_AGAIN
from gshard_m4.corpus.pair import rows, writing

COPY = "the same in another language"
MORE = "a fourth translation of one sentence"
FEW = "in a language that is not kept"
_TRANSLATIONS = 3
_COPY_WORDS = 4
_BLOCK = 500_000
_END = " .:…!?。："
_LARGE = "es pt fr de ru it id zh_Hans hi nb ar tr sr".split()
# Relatives may well have the same translation.
_RELATIVES = (
    "nb nn da sv no",
    "es ast gl an ext lad ca oc",
    "pt gl mwl",
    "id ms jv su min ban bew bjn ace mad bug",
    "hi mr ne mai bho sa awa new anp dgo doi brx kok mag",
    "sr bg mk ru uk be rue",
    "bs hr sr sr_Latn sl cnr",
    "zh_Hans zh_Hant yue wuu lzh gan hak",
    "de lb nds bar gsw ksh pfl nds_nl stq frr pdc",
    "fr frp wa pcd frc gcr gcf ht",
    "it lij vec lmo pms scn nap eml fur sc co egl rgn lld",
    "cs sk hsb dsb szl csb pl",
    "ar arz ary aeb acm",
    "nl li zea vls fy af nds_nl",
    "tr az crh gag",
)


@dataclasses.dataclass
class Merged:
    """What is left.

    Attributes:
        files: language -> its pairs, a file of foreign and English sentences; the largest first.
        languages: language -> pairs, also of those that are too small.
        sources: source -> pairs that are left of it.
        left_out: reason -> pairs.
    """

    files: dict[str, Path] = dataclasses.field(default_factory=dict)
    languages: Counter[str] = dataclasses.field(default_factory=Counter)
    sources: Counter[str] = dataclasses.field(default_factory=Counter)
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)


def merge(
    sources: Mapping[str, Path], folder: Path, aside: Path, *, least: int, most: int | None, always: Sequence[str]
) -> Merged:
    """Merges files of pairs.

    Args:
        sources: name of the source -> file with language, foreign, English on each line; the first one that has a
            pair keeps it.
        folder: an empty one, for the files of the languages.
        aside: file for what is left out, compressed.
        least: a language with fewer pairs is left out.
        most: languages to keep, the largest ones; None for all.
        always: languages that are kept however small.
    """
    names = list(sources)
    _distribute(sources, folder)
    found = Merged()
    large = {name: copies for name in _LARGE if (copies := _digests(folder / name))}
    with writing(aside) as left_out:
        for path in sorted(folder.iterdir()):
            language = path.name
            others = [held for name, held in large.items() if name != language and not _related(name, language)]
            kept = folder / f"{language}.tsv"
            by_source = Counter[str]()
            with writing(kept) as out:
                for source, foreign, english, reason in _judged(path, others):
                    if reason:
                        found.left_out[reason] += 1
                        left_out.write(f"{reason}\t{language}\t{foreign}\t{english}\n")
                    else:
                        by_source[names[source]] += 1
                        out.write(f"{foreign}\t{english}\n")
            path.unlink()
            found.files[language] = kept
            found.languages[language] = by_source.total()
            found.sources.update(by_source)
        large_enough = [name for name, count in found.languages.most_common() if count >= least][:most]
        keep = {*large_enough, *(name for name in always if found.languages[name])}
        for language in sorted({*found.files} - keep):
            path = found.files.pop(language)
            found.left_out[FEW] += found.languages[language]
            with path.open(encoding="utf-8", newline="\n") as lines:
                left_out.writelines(f"{FEW}\t{language}\t{line}" for line in lines)
            path.unlink()
    found.files = {name: found.files[name] for name, _ in found.languages.most_common() if name in found.files}
    return found


def _distribute(sources: Mapping[str, Path], folder: Path) -> None:
    """Writes number of the source, foreign and English to a file for each language."""
    for number, path in enumerate(sources.values()):
        with path.open(encoding="utf-8", newline="\n") as lines:
            while block := list(itertools.islice(lines, _BLOCK)):
                by_language: dict[str, list[str]] = defaultdict(list)
                for line in block:
                    language, _, rest = line.partition("\t")
                    by_language[language].append(f"{number}\t{rest}")
                for language, own in by_language.items():
                    with (folder / language).open("a", encoding="utf-8", newline="\n") as out:
                        out.writelines(own)


def _judged(path: Path, others: Sequence[set[bytes]]) -> Iterator[tuple[int, str, str, str]]:
    """Number of the source, foreign, English, and why the pair is left out, or nothing."""
    seen: set[bytes] = set()
    translations = Counter[str]()
    for number, foreign, english in rows(path):
        small = english.lower()
        same = _digest(small.rstrip(_END), foreign.lower().rstrip(_END))
        if same in seen:
            reason = SAME_AGAIN
        elif translations[small] >= _TRANSLATIONS:
            reason = MORE
        elif english.count(" ") + 1 >= _COPY_WORDS and _is_in(others, _digest(english, foreign)):
            reason = COPY
        else:
            seen.add(same)
            translations[small] += 1
            reason = ""
        yield int(number), foreign, english, reason


def _is_in(sets: Sequence[set[bytes]], digest: bytes) -> bool:
    return any(digest in held for held in sets)


def _digests(path: Path) -> set[bytes]:
    if not path.exists():
        return set()
    return {_digest(en, fo) for _, fo, en in rows(path) if en.count(" ") + 1 >= _COPY_WORDS}


def _digest(english: str, foreign: str) -> bytes:
    return hashlib.blake2b(f"{english}\t{foreign}".encode(), digest_size=12).digest()


def _related(one: str, other: str) -> bool:
    return any({one, other} <= set(family.split()) for family in _RELATIVES)
