"""Extract: the cleaned pairs of a source, each once, kept in a file until the source or the rules change.

NAME.pairs.tsv      language, foreign, English
NAME.left-out.tsv.gz    reason, language, foreign, English of every pair that is not worth training on
NAME.json           counts, and what they were made from; written last: with it the source is done
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_m4.corpus.cache import once, recall, work_folder
from gshard_m4.corpus.clean import clean, words
from gshard_m4.corpus.fetch import Fetched
from gshard_m4.corpus.pair import Pair, Unreadable, writing
from gshard_m4.corpus.readers import READERS
from gshard_m4.corpus.sentences import split

RULES_VERSION = 1
"""Raised when readers or rules give other pairs than before."""

SAME_AGAIN = "the same again"
_PARAGRAPH = 160  # characters; longer text may be several sentences
_WORTH_PROCESSES = 50_000_000  # bytes of archives


@dataclasses.dataclass(frozen=True)
class Extracted:
    """What came of a source.

    Attributes:
        name: of the source.
        pairs: file of the pairs.
        left_out: file of the pairs that are left out.
        counts: ``read``, ``pairs`` and ``words`` (English ones) as numbers; ``languages`` and ``left_out`` (by reason)
            as numbers by name; ``unreadable``: files that cannot be read and why.
    """

    name: str
    pairs: Path
    left_out: Path
    counts: Mapping[str, Any]


def extract_all(
    fetched: Sequence[Fetched], folder: Path, jobs: int, say: Callable[[str], None]
) -> dict[str, Extracted]:
    """Extracts every source that was fetched, the largest first; by their names.

    Args:
        fetched: the sources.
        folder: where the files are kept.
        jobs: processes.
        say: takes a line for each source.
    """
    there = sorted((got for got in fetched if got.folder), key=lambda got: -got.size)
    todo = [got for got in there if not _is_there(got, folder)]
    if todo and len(there) > len(todo):
        say(f"{len(there) - len(todo)} sources were read before")
    for number, (got, found) in enumerate(_run(todo, folder, jobs), 1):
        what = f"{found.counts['pairs']:,} pairs in {len(found.counts['languages'])} languages"
        say(f"[{number}/{len(todo)}] {got.source.title}: {what}")
    return {got.source.name: extract(got, folder) for got in fetched if got.folder}


def _run(todo: Sequence[Fetched], folder: Path, jobs: int) -> Iterator[tuple[Fetched, Extracted]]:
    if jobs <= 1 or len(todo) <= 1 or sum(got.size for got in todo) < _WORTH_PROCESSES:
        yield from ((got, extract(got, folder)) for got in todo)
        return
    # Not forked: JAX's threads may hold locks.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        running = {pool.submit(extract, got, folder): got for got in todo}
        try:
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def extract(got: Fetched, folder: Path) -> Extracted:
    """Reads and cleans all pairs of a source."""
    pairs, left_out, about = _files(got, folder)

    def make() -> dict[str, Any]:
        with work_folder(folder) as work:
            with writing(work / pairs.name) as out, writing(work / left_out.name) as aside:
                tally = Tally(out.write, aside.write)
                tally.take(READERS[got.source.reader](got.files), got.source.accelerators)
            for path in (pairs, left_out):
                (work / path.name).replace(path)
        return tally.counts()

    counts = once(about, _made_from(got), make, (pairs, left_out))
    return Extracted(got.source.name, pairs, left_out, counts)


def _is_there(got: Fetched, folder: Path) -> bool:
    *files, about = _files(got, folder)
    return recall(about, _made_from(got), files) is not None


def _files(got: Fetched, folder: Path) -> list[Path]:
    return [folder / f"{got.source.name}{ending}" for ending in (".pairs.tsv", ".left-out.tsv.gz", ".json")]


def _made_from(got: Fetched) -> list[Any]:
    return [RULES_VERSION, got.source.reader, got.source.accelerators, sorted(got.sha256.items())]


class Tally:
    """Cleans pairs, writes down the good ones once and the others with the reason, and counts.

    Args:
        keep: takes a line for each good pair.
        aside: takes a line for each of the others.
    """

    def __init__(self, keep: Callable[[str], Any], aside: Callable[[str], Any]):
        self._keep, self._aside = keep, aside
        self._seen: set[bytes] = set()
        self.read = self.words = 0
        self.languages, self.left_out = Counter[str](), Counter[str]()
        self.unreadable: list[tuple[str, str]] = []

    def take(self, items: Iterable[Pair | Unreadable], accelerators: str = "") -> None:
        """Cleans and writes them."""
        for item in items:
            if isinstance(item, Unreadable):
                self.unreadable.append(item)
                continue
            self.read += 1
            found = clean(item, accelerators)
            if isinstance(found, str):
                self._leave_out(found, item)
            elif len(found.english) <= _PARAGRAPH:
                self._take(found)
            else:
                for english, foreign in split(found.english, found.foreign):
                    self._take(Pair(found.language, foreign, english))

    def _take(self, pair: Pair) -> None:
        line = "\t".join(pair) + "\n"
        known = hashlib.blake2b(line.encode(), digest_size=16).digest()  # LibreOffice has three million
        if known in self._seen:
            self._leave_out(SAME_AGAIN, pair)
        elif len(pair.english) < _PARAGRAPH and len(words(pair.english)) < 2:
            self._leave_out("fewer than two words", pair)
        else:
            self._seen.add(known)
            self.languages[pair.language] += 1
            self.words += pair.english.count(" ") + 1
            self._keep(line)

    def _leave_out(self, reason: str, pair: Pair) -> None:
        self.left_out[reason] += 1
        self._aside("\t".join((reason, pair.language, _flat(pair.foreign), _flat(pair.english))) + "\n")

    def counts(self) -> dict[str, Any]:
        """All counts; see `Extracted`."""
        return {
            "read": self.read,
            "pairs": self.languages.total(),
            "words": self.words,
            "languages": dict(self.languages.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "unreadable": self.unreadable,
        }


def _flat(text: str) -> str:
    """On one line, and no longer than what tells which it is."""
    return " ".join(text[:2000].split())
