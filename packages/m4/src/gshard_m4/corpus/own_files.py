"""The user's own files: their pairs, cleaned as all text is, and pairs of dev and test, which are kept as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from gshard_m4.corpus import parallel
from gshard_m4.corpus.extract import Tally
from gshard_m4.corpus.pair import Pair, writing


class OwnFiles:
    """Reads the user's files.

    Args:
        rejected: a file to write, of lines that are no pairs, with their reasons.

    Attributes:
        rejected: reason -> lines.
        files: what the manifest has of each file.
        first_bad: where the first line is that is no pair, and what is wrong with it.
    """

    def __init__(self, rejected: Path):
        self._path = rejected
        rejected.touch()
        self.rejected = Counter[str]()
        self.files: list[dict[str, Any]] = []
        self.first_bad: str | None = None

    def extract(self, files: Sequence[Path], pairs: Path, aside: Path) -> Tally:
        """Writes the pairs of files, cleaned; what came of them.

        Args:
            files: of the user's.
            pairs: file to write: language, foreign, English.
            aside: file for the pairs that cleaning leaves out.
        """
        with writing(pairs) as out, writing(aside) as left_out:
            tally = Tally(out.write, left_out.write)
            for file in files:
                before = tally.languages.total()
                tally.take(self._good(file))
                self.files[-1]["pairs"] = tally.languages.total() - before
        return tally

    def held_out(self, files: Sequence[Path], languages: Collection[str], path: Path) -> Path:
        """Writes the pairs of files for dev or test as they are, blanks joined, and returns the path.

        Args:
            files: of the user's.
            languages: those that there is training text in; pairs of others are rejected.
            path: where to write.
        """
        with writing(path) as out:
            for file in files:
                out.writelines("\t".join(pair) + "\n" for pair in self._good(file, languages))
        return path

    def _good(self, file: Path, languages: Collection[str] | None = None) -> Iterator[Pair]:
        """The pairs of a file; if languages are given, those to hold out."""
        told: dict[str, Any] = {"path": str(file), "pairs": 0, "rejected": 0}
        self.files.append(told)
        with self._path.open("a", encoding="utf-8", newline="\n") as bad:
            for number, item in enumerate(parallel.read(file), 1):
                if isinstance(item, Pair) and languages is not None:
                    item = _usable(number, item, languages)
                if isinstance(item, Pair):
                    told["pairs"] += 1
                    yield item
                else:
                    told["rejected"] += 1
                    self.rejected[item.reason] += 1
                    self.first_bad = self.first_bad or f"{file}:{item.number}, {item.reason}"
                    bad.write(f"{file}:{item.number}\t{item.reason}\t{' '.join(item.text.splitlines())}\n")


def _usable(number: int, pair: Pair, languages: Collection[str]) -> Pair | parallel.BadLine:
    foreign, english = (" ".join(side.split()) for side in (pair.foreign, pair.english))
    if not foreign or not english:
        return parallel.BadLine(number, "nothing on one side", pair.foreign or pair.english)
    if pair.language not in languages:
        return parallel.BadLine(number, f"a language without training text ({pair.language})", foreign)
    return Pair(pair.language, foreign, english)
