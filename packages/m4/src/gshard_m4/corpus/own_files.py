"""The user's own files: their pairs, cleaned as all text is, and pairs of dev and test, which are kept as they are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from gshard_m4.corpus import parallel
from gshard_m4.corpus.extract import Tally
from gshard_m4.corpus.pair import Pair, writing


@dataclasses.dataclass
class Own:
    """What the user's files gave.

    Attributes:
        pairs: a file of language, foreign and English.
        bad_lines: a file of lines that are no pairs, with their reasons.
        tally: pairs by language, and what cleaning left out.
        rejected: reason -> lines.
        files: what the manifest has of each file.
        first_bad: where the first line is that is no pair, and what is wrong with it.
    """

    pairs: Path
    bad_lines: Path
    tally: Tally
    rejected: Counter[str]
    files: list[dict[str, Any]]
    first_bad: str | None = None

    def held_out(self, files: Sequence[Path], languages: Collection[str], path: Path) -> Path:
        """Writes the pairs of files for dev or test as they are, blanks joined, and returns the path.

        Args:
            files: of the user's.
            languages: those that there is training text in; pairs of others are rejected.
            path: where to write.
        """
        with writing(path) as out, self.bad_lines.open("a", encoding="utf-8", newline="\n") as bad:
            for file in files:
                count = rejected = 0
                for number, item in enumerate(parallel.read(file), 1):
                    if isinstance(item, Pair):
                        item = _usable(number, item, languages)
                    if isinstance(item, Pair):
                        out.write("\t".join(item) + "\n")
                        count += 1
                    else:
                        self.reject(file, item, bad)
                        rejected += 1
                self.files.append({"path": str(file), "pairs": count, "rejected": rejected})
        return path

    def reject(self, file: Path, line: parallel.BadLine, bad: TextIO) -> None:
        """Counts and writes a line that is no pair."""
        self.rejected[line.reason] += 1
        self.first_bad = self.first_bad or f"{file}:{line.number}, {line.reason}"
        bad.write(f"{file}:{line.number}\t{line.reason}\t{' '.join(line.text.splitlines())}\n")


def extract(files: Sequence[Path], work: Path, aside: Path) -> Own:
    """Writes the pairs of the user's files, cleaned.

    Args:
        files: of the user's.
        work: folder for the result.
        aside: file for the pairs that cleaning leaves out, compressed.
    """
    bad_lines = work / "own.bad.tsv"
    with (
        writing(work / "own.pairs.tsv") as out,
        writing(bad_lines) as bad,
        writing(aside) as left_out,
    ):
        tally = Tally(out.write, left_out.write)
        own = Own(work / "own.pairs.tsv", bad_lines, tally, Counter(), [])
        for file in files:
            before, rejected_before = tally.languages.total(), own.rejected.total()
            tally.take(_good(file, own, bad))
            pairs, rejected = tally.languages.total() - before, own.rejected.total() - rejected_before
            own.files.append({"path": str(file), "pairs": pairs, "rejected": rejected})
    return own


def _good(file: Path, own: Own, bad: TextIO) -> Iterator[Pair]:
    for item in parallel.read(file):
        if isinstance(item, Pair):
            yield item
        else:
            own.reject(file, item, bad)


def _usable(number: int, pair: Pair, languages: Collection[str]) -> Pair | parallel.BadLine:
    foreign, english = (" ".join(side.split()) for side in (pair.foreign, pair.english))
    if not foreign or not english:
        return parallel.BadLine(number, "nothing on one side", pair.foreign or pair.english)
    if pair.language not in languages:
        return parallel.BadLine(number, f"a language without training text ({pair.language})", foreign)
    return Pair(pair.language, foreign, english)
