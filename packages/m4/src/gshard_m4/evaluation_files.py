"""Files of an evaluation, which later ones are compared with. Its folder has

results.json       scores of each language, and hashes of the sentences they were measured on
scores.csv         the same as a table, with the differences to the baseline
classes.csv        scores of high-, medium- and low-resource languages, each class as one text
translations.tsv   language, source, reference, translation, as they were scored
languages.svg      differences to the baseline (or scores), languages from high to low resource
known-english/     the same for the test of known English
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_m4.by_class import OfClass
from gshard_m4.corpus.pair import Pair
from gshard_m4.evaluate import EvaluateError, Results, resource_classes

TRANSLATIONS = "translations.tsv"
SCORES, BY_CLASS = "scores.csv", "classes.csv"


def read_translations(folder: Path) -> dict[str, list[str]]:
    """What an evaluation wrote down: language -> translations; empty if the file is not there.

    Raises:
        EvaluateError: the file is something else.
    """
    path = folder / TRANSLATIONS
    found: dict[str, list[str]] = {}
    try:
        for line in path.read_text("utf-8").splitlines():
            code, _, _, translation = line.split("\t")
            found.setdefault(code, []).append(translation)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EvaluateError(
            "these are no translations.", where=str(path), got=str(error), hint="Run gshard-m4 evaluate again."
        ) from error
    return found


def save(
    folder: Path,
    results: Results,
    examples: Sequence[Pair],
    translations: Sequence[str],
    languages: Sequence[OfClass] = (),
    classes: Sequence[OfClass] = (),
) -> None:
    """Writes the files of an evaluation, except the figure.

    Raises:
        EvaluateError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.save(folder)
        _write_table(folder / SCORES, _rows(results, languages))
        _write_table(folder / BY_CLASS, [_rounded(row) for row in classes])
        with (folder / TRANSLATIONS).open("w", encoding="utf-8") as file:
            for example, translation in zip(examples, translations, strict=True):
                file.write("\t".join(" ".join(cell.split()) for cell in (*example, translation)) + "\n")
    except OSError as error:
        raise EvaluateError(f"results cannot be written: {error.strerror}.", where=str(folder)) from error


def _rows(results: Results, languages: Sequence[OfClass]) -> Iterator[dict[str, Any]]:
    """One row for each language, from high to low resource."""
    classes = resource_classes(results)
    for rank, of in enumerate(languages, 1):
        row: dict[str, Any] = {"rank": rank, "language": of.resource, "class": classes[of.resource], "pairs": of.most}
        left_out = ("resource", "languages", "fewest", "most", "compared", "english")
        row |= {name.replace("chrf", "chrf++"): value for name, value in _rounded(of).items() if name not in left_out}
        yield row


def _rounded(row: OfClass) -> dict[str, Any]:
    return {n: round(value, 4) if isinstance(value, float) else value for n, value in dataclasses.asdict(row).items()}


def _write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    table = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]) if table else [])
        writer.writeheader()
        writer.writerows(table)
