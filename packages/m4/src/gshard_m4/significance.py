"""Significance: how sure a score is, and whether one system is better than another by more than chance.

Sentences are drawn again, with replacement, a thousand times (Koehn, 2004): the scores of those samples give an
interval around a score, and, drawn alike for two systems, the probability that a difference as large comes about by
chance. Both are sacrebleu's, with its seed, so the same translations have the same numbers.

>>> english = [f"open the new file number {n} now" for n in range(30)]
>>> worse = [line.replace("file", "door") if n % 2 else line for n, line in enumerate(english)]
>>> found = compare(english, english, worse)
>>> found.bleu_p < 0.01, compare(english, english, english).bleu_p
(True, 1.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest, Result

SAMPLES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Sureness:
    """How sure the scores of some translations are.

    Attributes:
        bleu, chrf: half the width of the interval that holds 95 % of the samples' scores.
        bleu_p, chrf_p: probability of a difference as large between systems that are equally good; None if there is
            nothing to compare with.
    """

    bleu: float
    chrf: float
    bleu_p: float | None = None
    chrf_p: float | None = None


def compare(references: Sequence[str], ours: Sequence[str], theirs: Sequence[str] | None = None) -> Sureness:
    """Intervals of our scores, and whether they differ from another system's.

    Args:
        references: what should have been written.
        ours: what was.
        theirs: what a baseline wrote.
    """
    systems: list[tuple[str, Sequence[str]]] = [] if theirs is None else [("theirs", list(theirs))]
    systems.append(("ours", list(ours)))
    metrics = {"BLEU": BLEU(), "chrF++": CHRF(word_order=2)}
    _, scores = PairedTest(systems, metrics, [list(references)], "bs", SAMPLES)()
    bleu, chrf = (cast(Result, scores[name][-1]) for name in ("BLEU", "chrF2++"))
    # sacrebleu counts larger differences than the one there is, and finds none where all of them are zero.
    same = theirs is not None and list(theirs) == list(ours)
    p = (1.0, 1.0) if same else (bleu.p_value, chrf.p_value)
    return Sureness(float(bleu.ci or 0.0), float(chrf.ci or 0.0), *p)
