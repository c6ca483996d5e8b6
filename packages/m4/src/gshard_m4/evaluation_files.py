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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gshard_m4.by_class import OfClass
from gshard_m4.evaluate import EvaluateError, Results, resource_classes
from gshard_m4.significance import Sureness, holm
from gshard_m4.translate import Example

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


def rows(
    results: Results, deltas: Mapping[str, tuple[float, float]], sure: Mapping[str, Sureness] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """One row for each language, from high to low resource; without a baseline there are no differences."""
    classes = resource_classes(results)
    found = []
    for rank, (code, of) in enumerate(results.languages.items(), 1):
        row: dict[str, Any] = {"rank": rank, "language": code, "class": classes[code], "pairs": of.pairs}
        row |= {"sentences": of.sentences, "bleu": round(of.bleu, 2), "chrf++": round(of.chrf, 2)}
        if sure:
            row |= {"bleu_95": round(sure[code].bleu, 2), "chrf++_95": round(sure[code].chrf, 2)}
        if deltas:
            bleu, chrf = deltas.get(code, (None, None))
            row |= {"delta_bleu": None if bleu is None else round(bleu, 2)}
            row |= {"delta_chrf++": None if chrf is None else round(chrf, 2)}
            if sure:
                row |= {"p_bleu": _p(sure[code].bleu_p), "p_chrf++": _p(sure[code].chrf_p)}
        found.append(row)
    if deltas and sure:  # of all languages and both measures together
        corrected = iter(holm([p for code in results.languages for p in (sure[code].bleu_p, sure[code].chrf_p)]))
        for row in found:
            row |= {"p_bleu_holm": _p(next(corrected)), "p_chrf++_holm": _p(next(corrected))}
    return found


def _p(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def save(
    folder: Path,
    results: Results,
    deltas: Mapping[str, tuple[float, float]],
    examples: Sequence[Example],
    translations: Sequence[str],
    sure: Mapping[str, Sureness] = MappingProxyType({}),
    classes: Sequence[OfClass] = (),
) -> None:
    """Writes the files of an evaluation, except the figure.

    Raises:
        EvaluateError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.save(folder)
        _write_table(folder / SCORES, rows(results, deltas, sure))
        _write_table(folder / BY_CLASS, [_rounded(dataclasses.asdict(row)) for row in classes])
        with (folder / TRANSLATIONS).open("w", encoding="utf-8") as file:
            for example, translation in zip(examples, translations, strict=True):
                file.write("\t".join(" ".join(cell.split()) for cell in (*example, translation)) + "\n")
    except OSError as error:
        raise EvaluateError(f"results cannot be written: {error.strerror}.", where=str(folder)) from error


def _write_table(path: Path, table: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]) if table else [])
        writer.writeheader()
        writer.writerows(table)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
