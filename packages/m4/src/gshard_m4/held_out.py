"""Held out: the two tests of a corpus, what each of them shows, and where its scores are kept.

*New English* asks for sentences that the model has never been shown in any language. *Known English* asks for pairs
that it has not been shown, of sentences that it has been shown from other languages: what a language gains from being
trained together with others. See `gshard_m4.corpus.hold_out` and `gshard_m4.corpus.known_english`.
"""

from __future__ import annotations

import dataclasses

from gshard_m4.corpus.hold_out import DEV, TEST
from gshard_m4.corpus.known_english import KNOWN_DEV, KNOWN_TEST


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOut:
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

NO_KNOWN = (
    "This corpus has no test of known English: an earlier version prepared it, --known 0 was given, or too few of its "
    "sentences are in three languages. gshard-m4 prepare --output FOLDER makes another corpus."
)
