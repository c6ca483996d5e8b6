"""From sentences to sentences: vocabularies around the search.

A `Translator` is a trained model with the vocabularies it was trained with; it pads sentences to few widths, so that
the search is compiled once for each.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gshard import GShardError, moe
from gshard_m4 import checkpoint
from gshard_m4.config import Run
from gshard_m4.corpus.language import language as canonical
from gshard_m4.decode import EOS, DecodeConfig, ids_of
from gshard_m4.language_names import name_of
from gshard_m4.placeholders import Marked, complete, lost_and_invented, mark, without
from gshard_m4.stream import Found, Search, Sentence, placed
from gshard_m4.text import PreparedText

_UNFAMILIAR = 0.5  # share of a sentence's ids that are single bytes


class TranslateError(GShardError):
    """There is no model that could translate, or it does not belong to these vocabularies."""


class Hypothesis(NamedTuple):
    """One of several translations, and the normalised log-probability that it is ranked by."""

    text: str
    score: float


@dataclasses.dataclass(frozen=True, slots=True)
class Translated:
    """What became of one sentence.

    Attributes:
        hypotheses: its translations, best first; none for an empty sentence. Each is a single line.
        cut: whether the source was longer than the model reads and its end was not read.
        tokens: how many source tokens were read, end included.
        placeholders: of the sentence.
        lost: placeholders of the sentence that the model did not write, and that were put into the best translation.
        invented: those that it wrote and the sentence does not have, and that were taken out.
        unfamiliar: whether most of the sentence is in letters that the model was not trained on, as of a language that
            it does not know.
    """

    hypotheses: tuple[Hypothesis, ...] = ()
    cut: bool = False
    tokens: int = 0
    placeholders: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    invented: tuple[str, ...] = ()
    unfamiliar: bool = False

    @property
    def text(self) -> str:
        """The best translation; empty for an empty sentence."""
        return self.hypotheses[0].text if self.hypotheses else ""


class Prepared(NamedTuple):
    """A sentence on its way into the search.

    Attributes:
        sentence: as it came, but for an end that is too far behind to be read.
        marked: what was taken out of it.
        searched: what the search is given; None if there is nothing to translate.
        cut, unfamiliar: see `Translated`.
    """

    sentence: str
    marked: Marked
    searched: Sentence | None = None
    cut: bool = False
    unfamiliar: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Translator:
    """A trained model and its vocabularies.

    A sentence is padded to a width that depends on its own length only, and searched for among ``batch`` sentences of
    that width, made up if need be. All of a width run the same compiled program, in which rows do not see each
    other, so the translation of a sentence is the same, to the last bit, whatever it is translated with.

    Attributes:
        model: its configuration.
        params: its parameters.
        text: the vocabularies.
        options: how to search.
        batch: sentences that are translated together.
        devices: how many to partition the search over.
    """

    model: moe.TransformerConfig
    params: Any
    text: PreparedText
    options: DecodeConfig
    batch: int = 32
    devices: int = 1

    @property
    def languages(self) -> Mapping[str, int]:
        """The languages the model was trained on, with the number of training pairs of each, largest first."""
        found = self.text.languages
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def check_language(self, language: str) -> str:
        """The code of a language in this corpus.

        Args:
            language: a code, or the English name of a language.

        Raises:
            TranslateError: the model was not trained on it.
        """
        known = self.languages
        plain = language.strip().casefold()
        folded = plain.replace("-", "_")
        codes = {code.casefold(): code for code in known}
        names = {name_of(code).casefold(): code for code in known}
        for found in (codes.get(folded), names.get(plain), canonical(language)):  # de-AT is de, iw is he
            if found in known:
                return str(found)
        words = codes | names
        near = [words[word] for word in difflib.get_close_matches(folded, words, cutoff=0.6)]
        near += [code for code in known if code.casefold().split("_")[0] == folded.split("_")[0]]
        near = [f"{code} ({name_of(code)})" for code in dict.fromkeys(near)]
        raise TranslateError(
            f"the model knows no language {language!r}.",
            got=f"{len(known)} languages: {', '.join(list(known)[:12])}{', ...' if len(known) > 12 else ''}",
            hint=f"Did you mean {' or '.join(near[:3])}?" if near else "Leave --from out.",
        )

    def translate(self, sentences: Sequence[str], language: str | None = None) -> list[Translated]:
        """Translates any number of sentences; an empty one stays empty, and the order is kept.

        Args:
            sentences: what to translate.
            language: of all of them, as `check_language` returns it; None if the model is to tell by itself.

        Raises:
            TranslateError: the model gives no finite probability to any translation.
        """
        prepared = [self.prepare(sentence, language) for sentence in sentences]
        ended = {number: self.finish(one) for number, one in enumerate(prepared) if not one.searched}
        search = self.search(steps=1 << 20)
        for number, one in enumerate(prepared):
            if one.searched:
                search.add(number, one.searched)
        while search.busy:
            ended |= {found.ticket: self.finish(prepared[found.ticket], found) for found in search.step()}
        return [ended[number] for number in range(len(prepared))]

    def prepare(self, sentence: str, language: str | None = None) -> Prepared:
        """What the search is given of a sentence.

        Args:
            sentence: a line of text.
            language: its language, as `check_language` returns it, or None.
        """
        room = self.text.length - 1
        # A piece has 16 letters at most: what lies behind could only be cut off.
        letters = 32 * self.text.length
        head = sentence[: 2 * letters]
        marked = mark(head) if self.options.placeholders else Marked(head)
        if len(head) == len(sentence) and marked != Marked(head) and not any(map(str.isalpha, without(marked.plain))):
            return Prepared(sentence, marked)  # nothing but placeholders, tags and signs
        shown = marked.plain[:letters]
        ids = self.text.source_ids(shown)
        if not ids:
            return Prepared(head, marked)
        unfamiliar = self.text.spelt_in_bytes(ids) > _UNFAMILIAR
        if language is not None:
            ids = [self.text.tag(language), *ids]
        cut = len(ids) > room or len(shown) < len(marked.plain) or len(head) < len(sentence)
        kept = (*ids[:room], EOS)
        width = _width(len(kept), self.text.length)
        return Prepared(head, marked, Sentence(kept, width), cut, unfamiliar)

    def search(self, steps: int = 8) -> Search:
        """A search for sentences that are prepared.

        Args:
            steps: tokens after which others are let in.
        """
        return Search(self.model, self.params, self.options, self.batch, steps, self.devices)

    def finish(self, prepared: Prepared, found: Found | None = None) -> Translated:
        """What became of a sentence.

        Args:
            prepared: the sentence.
            found: what the search found, if it was searched for.

        Raises:
            TranslateError: the model gives no finite probability to any translation.
        """
        sentence, marked, searched, cut, unfamiliar = prepared
        if searched is None or found is None:
            copied = sentence.strip() and marked != Marked(sentence)
            return Translated((Hypothesis(sentence, 0.0),) if copied else ())
        if not np.isfinite(found.score_N[0]):
            raise TranslateError(
                "the model gives no finite probability to any translation.",
                got=f"score {found.score_N[0]}",
                hint="The run has diverged: use an earlier checkpoint with --step, or train again.",
            )
        wanted = marked.placeholders
        written: list[Hypothesis] = []
        for tokens_T, score in zip(found.tokens_NT, found.score_N, strict=True):
            if np.isfinite(score):
                # Bytes that spell a line break must not become one: lines out are lines in.
                text = " ".join(self.text.english(ids_of(tokens_T)).split())
                written.append(Hypothesis(text, float(score)))
        if not self.options.placeholders:
            return Translated(tuple(written), cut, len(searched.ids), unfamiliar=unfamiliar)
        # Of several translations those that keep everything come first.
        written.sort(key=lambda of: lost_and_invented(wanted, of.text) != ([], []))
        lost, invented = map(tuple, lost_and_invented(wanted, written[0].text))
        hypotheses = tuple(Hypothesis(marked.restore(complete(of.text, wanted)), of.score) for of in written)
        return Translated(hypotheses, cut, len(searched.ids), wanted, lost, invented, unfamiliar)


def _width(tokens: int, longest: int) -> int:
    """Tokens of the rows that a source is padded to: a power of two from 16 on, or the longest."""
    return min(max(16, 1 << (tokens - 1).bit_length()), longest)


def load(
    run: Run, text: PreparedText, options: DecodeConfig, step: int | None = None, *, batch: int = 32, devices: int = 1
) -> Translator:
    """The translator of a finished run.

    Args:
        run: the folder it was trained in.
        text: the corpus it was trained on.
        options: how to search.
        step: which checkpoint; the newest that is sound if None.
        batch: sentences that are translated together.
        devices: how many to partition the search over.

    Raises:
        CheckpointError: there is no such checkpoint, or none is sound.
        TranslateError: the vocabularies are not those of the run.
    """
    if batch < 1:
        raise TranslateError(f"cannot translate {batch} sentences at a time.", hint="Use --batch 1 or more.")
    _, state, meta = checkpoint.restore(run.checkpoints, step)
    if meta.get("vocabularies") != text.fingerprint:
        raise TranslateError(
            "the model was trained with other vocabularies.",
            where=str(run.checkpoints),
            got=f"vocabularies: {meta.get('vocabularies')} of the model, {text.fingerprint} of the corpus",
            hint="Name the folder of the corpus it was trained on, or train again.",
        )
    if meta.get("only"):
        text = text.of_languages(meta["only"])
    model = moe.TransformerConfig(**meta["model"])
    return Translator(model, placed(model, state["params"], devices), text, options, batch, devices)
