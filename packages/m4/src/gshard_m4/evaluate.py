"""Evaluation of a run: scores of each language, and differences to another run's.

A difference is only ever formed of scores of the same sentences, computed in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard import GShardError
from gshard_m4 import score
from gshard_m4.corpus.pair import Pair

RESULTS = "results.json"
CLASSES = ("high", "medium", "low")


class EvaluateError(GShardError):
    """Results cannot be read, or cannot be compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class OfLanguage:
    """The score of one language.

    Attributes:
        pairs: sentences it was trained on; 0 if not known.
        sentences: sentences that were translated.
        bleu, chrf: see `score.Score`.
        test: hash of those sentences and their references.
    """

    pairs: int
    sentences: int
    bleu: float
    chrf: float
    test: str


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The scores of one model.

    Attributes:
        name: of the model.
        languages: from high to low resource.
        overall: BLEU and chrF++ of all sentences together.
        signature: how sacrebleu computed the scores.
        step: of the checkpoint.
        cross_entropy: of the dev part that belongs to the test, nats a token; None if it was not measured.
        beside: translators that know nothing -> their BLEU and chrF++ on the same sentences.
        cut: sentences that are longer than the model reads, so that only their beginning was translated.
        near_twins: sentences that have a near twin in training; None if nothing looked for them.
    """

    name: str
    languages: Mapping[str, OfLanguage]
    overall: tuple[float, float]
    signature: str
    step: int | None = None
    cross_entropy: float | None = None
    beside: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    cut: int | None = None
    near_twins: int | None = None

    def save(self, folder: Path) -> None:
        """Writes ``results.json``."""
        written = dataclasses.asdict(self) | {"format": 1}
        (folder / RESULTS).write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", "utf-8")

    @staticmethod
    def load(path: Path) -> Results:
        """Reads ``results.json``, or the folder that has one.

        Raises:
            EvaluateError: there is none, or it is something else.
        """
        path = path / RESULTS if path.is_dir() else path
        try:
            found = json.loads(path.read_text("utf-8"))
            if found.pop("format") != 1:
                raise ValueError("written by another version")
            languages = {name: OfLanguage(**of) for name, of in found.pop("languages").items()}
            bleu, chrf = map(float, found.pop("overall"))
            return Results(languages=languages, overall=(bleu, chrf), **found)
        except OSError as error:
            raise EvaluateError(f"results cannot be read: {error.strerror}.", where=str(path)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluateError(
                "this is no file of results.", where=str(path), got=str(error), hint="Run gshard-m4 evaluate again."
            ) from error


def measure(
    name: str,
    examples: Sequence[Pair],
    translations: Sequence[str],
    pairs: Mapping[str, int],
    step: int | None = None,
) -> Results:
    """Scores translations of examples, language by language.

    Args:
        name: of the model.
        examples: what was translated.
        translations: of each.
        pairs: number of training pairs of each language.
        step: of the checkpoint.
    """
    codes, _, references = (list(column) for column in zip(*examples, strict=True))
    scores = score.score(translations, references, codes)
    hashes = _hashes(examples)
    found = {
        code: OfLanguage(pairs.get(code, 0), of.sentences, of.bleu, of.chrf, hashes[code])
        for code, of in scores.items()
        if code != score.ALL
    }
    ordered = dict(sorted(found.items(), key=lambda item: (-item[1].pairs, item[0])))
    overall = scores[score.ALL]
    return Results(name, ordered, (overall.bleu, overall.chrf), overall.signature, step)


def resource_classes(results: Results) -> dict[str, str]:
    """high, medium or low for each language: a quarter, half and a quarter of them, by training pairs.

    These are the shares of Arivazhagan et al. (2019), 25, 52 and 25 of 102 languages.

    >>> of = {str(n): OfLanguage(100 - n, 1, 0.0, 0.0, "") for n in range(8)}
    >>> list(resource_classes(Results("m", of, (0.0, 0.0), "")).values())
    ['high', 'high', 'medium', 'medium', 'medium', 'medium', 'low', 'low']
    """
    count = len(results.languages)
    quarter = round(count * 25 / 102)
    return {
        code: CLASSES[0] if at < quarter else CLASSES[2] if at >= count - quarter else CLASSES[1]
        for at, code in enumerate(results.languages)
    }


def differences(results: Results, baselines: Sequence[Results]) -> dict[str, tuple[float, float]]:
    """By how many points of BLEU and chrF++ a model is better than a baseline, for the languages of the baseline.

    Several baselines are one that was measured in parts: models for one language each, say.

    Raises:
        EvaluateError: scores are not of the same sentences, were computed differently, or two baselines have a language
            in common.
    """
    found: dict[str, tuple[float, float]] = {}
    owner: dict[str, str] = {}
    for baseline in baselines:
        if baseline.signature != results.signature:
            raise EvaluateError(
                "scores that were computed differently cannot be compared.",
                where=baseline.name,
                got=f"{baseline.signature}, and here {results.signature}",
                hint="Evaluate both with the same version.",
            )
        for code in (code for code in results.languages if code in baseline.languages):
            ours, theirs = results.languages[code], baseline.languages[code]
            if code in owner:
                raise EvaluateError(
                    f"two baselines have the language {code}.", got=f"{owner[code]} and {baseline.name}"
                )
            if ours.test != theirs.test:
                raise EvaluateError(
                    f"scores of {code} are not of the same sentences.",
                    where=baseline.name,
                    got=f"{theirs.sentences} sentences {theirs.test[:8]}, and here {ours.sentences} {ours.test[:8]}",
                    hint="Evaluate both with the same corpus and the same --sentences.",
                )
            owner[code] = baseline.name
            found[code] = ours.bleu - theirs.bleu, ours.chrf - theirs.chrf
    return found


def _hashes(examples: Sequence[Pair]) -> dict[str, str]:
    """A hash of the sentences of each language, in order."""
    found: dict[str, Any] = {}
    for code, source, english in examples:
        found.setdefault(code, hashlib.sha256()).update(f"{source}\t{english}\n".encode())
    return {code: of.hexdigest() for code, of in found.items()}
