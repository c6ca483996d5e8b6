"""Tests of a corpus, and the files of their evaluation, which later ones are compared with. Its folder has

results.json       scores of each language, and hashes of the sentences they were measured on
scores.csv         the same as a table, with the differences to the baseline
classes.csv        scores of high-, medium- and low-resource languages, each class as one text
translations.tsv   language, source, reference, translation, as they were scored
languages.svg      differences to the baseline (or scores), languages from high to low resource
known-english/     the same for the test of known English

*New English* asks for sentences that the model has never been shown in any language. *Known English* asks for pairs
that it has not been shown, of sentences that it has been shown from other languages: what a language gains from being
trained together with others. See `gshard_m4.corpus.hold_out` and `gshard_m4.corpus.known_english`.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gshard import GShardError
from gshard_m4.by_class import Row, Scored
from gshard_m4.corpus.hold_out import DEV, TEST
from gshard_m4.corpus.known_english import KNOWN_DEV, KNOWN_TEST
from gshard_m4.corpus.pair import Pair

RESULTS, TRANSLATIONS, SCORES, BY_CLASS = "results.json", "translations.tsv", "scores.csv", "classes.csv"


class EvaluateError(GShardError):
    """Results cannot be read or written, or cannot be compared."""


class HeldOut(NamedTuple):
    """A test of a corpus.

    Attributes:
        name: of the test.
        test: the part that is translated and scored.
        dev: the part whose cross entropy may decide between models.
        folder: of its scores, in the folder of an evaluation.
        about: in what its sentences are new.
    """

    name: str
    test: str
    dev: str
    folder: str
    about: str


KNOWN_ENGLISH = HeldOut(
    "known English", KNOWN_TEST, KNOWN_DEV, "known-english",
    "the pair is in no training text; its English is, from other languages",
)  # fmt: skip
NEW_ENGLISH = HeldOut("new English", TEST, DEV, "", "the English is in no training pair of any language")
BOTH = (KNOWN_ENGLISH, NEW_ENGLISH)


class Line(NamedTuple):
    """A line of translations.tsv; a cell has single blanks between words, which no score depends on."""

    language: str
    source: str
    english: str
    translation: str


def lines_of(examples: Sequence[Pair], translations: Sequence[str]) -> list[Line]:
    """Examples and what was written for each, as lines of a file."""
    rows = ((*example, line) for example, line in zip(examples, translations, strict=True))
    return [Line(*(" ".join(cell.split()) for cell in row)) for row in rows]


def read_lines(folder: Path) -> list[Line]:
    """What an evaluation translated, and into what.

    Raises:
        EvaluateError: there is no file of translations, or it is something else.
    """
    path = folder / TRANSLATIONS
    try:
        return [Line(*line.split("\t")) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise EvaluateError(
            "these are no translations.", where=str(path), got=str(error), hint="Run gshard-m4 evaluate again."
        ) from error


def joined(examples: Sequence[Pair], baselines: Mapping[str, Sequence[Line]]) -> list[str | None]:
    """What baselines wrote for each example; None where they do not have the language.

    Several baselines are one that was measured in parts: models for one language each, say.

    Raises:
        EvaluateError: a baseline lacks sentences of a language that it has, or two baselines have a language in common.
    """
    keys = [line[:3] for line in lines_of(examples, [""] * len(examples))]
    languages = {key[0] for key in keys}
    found: dict[tuple[str, ...], str] = {}
    owner: dict[str, str] = {}
    for name, lines in baselines.items():
        for code in sorted(languages & {line.language for line in lines}):
            if code in owner:
                raise EvaluateError(f"two baselines have the language {code}.", got=f"{owner[code]} and {name}")
            owner[code] = name
        found |= {line[:3]: line.translation for line in lines}
    for key in keys:
        if key[0] in owner and key not in found:
            raise EvaluateError(
                f"scores of {key[0]} are not of the same sentences.",
                where=owner[key[0]],
                got=f"no translation of {key[1]!r}",
                hint="Evaluate both with the same corpus, and the baseline with as many --sentences or more.",
            )
    return [found.get(key) for key in keys]


def save(
    folder: Path,
    about: Mapping[str, Any],
    scored: Scored,
    translations: Sequence[str],
    languages: Sequence[Row],
    classes: Sequence[Row],
) -> None:
    """Writes the files of an evaluation, except the figure.

    Args:
        folder: where to; it is made.
        about: what is known of the model and its scores besides these.
        scored, translations: what was translated, and into what.
        languages, classes: their scores; the last class has all languages.

    Raises:
        EvaluateError: the folder cannot be written.
    """
    tests: dict[str, Any] = {}
    for code, source, english in scored.examples:
        tests.setdefault(code, hashlib.sha256()).update(f"{source}\t{english}\n".encode())
    scores = {
        of.resource: {
            "pairs": of.most, "sentences": of.sentences, "bleu": of.bleu, "chrf": of.chrf,
            "test": tests[of.resource].hexdigest(),
        }
        for of in languages
    }  # fmt: skip
    results = {**about, "languages": scores, "overall": [classes[-1].bleu, classes[-1].chrf], "format": 1}
    of_language = scored.classes
    left_out = ("resource", "languages", "fewest", "most", "compared", "english")
    table = [
        {"rank": rank, "language": of.resource, "class": of_language[of.resource], "pairs": of.most}
        | {name.replace("chrf", "chrf++"): value for name, value in _rounded(of).items() if name not in left_out}
        for rank, of in enumerate(languages, 1)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
        _write_table(folder / SCORES, table)
        _write_table(folder / BY_CLASS, [_rounded(row) for row in classes])
        lines = ("\t".join(line) + "\n" for line in lines_of(scored.examples, translations))
        (folder / TRANSLATIONS).write_text("".join(lines), "utf-8")
    except OSError as error:
        raise EvaluateError(f"results cannot be written: {error.strerror}.", where=str(folder)) from error


def _rounded(row: Row) -> dict[str, Any]:
    return {n: round(value, 4) if isinstance(value, float) else value for n, value in dataclasses.asdict(row).items()}


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
