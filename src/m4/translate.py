"""From sentences to sentences: vocabularies around the search.

`Text` is all that training and translating ask of a prepared corpus. A `Translator` is a trained model with the
vocabularies it was trained with; it splits any number of sentences into batches of few shapes, so that the search is
compiled once for each.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from gshard import GShardError, moe
from m4 import checkpoint
from m4.config import Run
from m4.corpus.language import language as canonical
from m4.decode import EOS, PAD, DecodeConfig, ids_of, make_decode


class TranslateError(GShardError):
    """There is no model that could translate, or it does not belong to these vocabularies."""


class Example(NamedTuple):
    """A sentence with its translation by a human."""

    language: str
    source: str
    english: str


class Text(Protocol):
    """A prepared corpus: vocabularies, training batches and held-out sentences."""

    @property
    def fingerprint(self) -> str:
        """Hash of both vocabularies."""

    @property
    def digest(self) -> str:
        """Hash of all that the batches follow from."""

    @property
    def source_vocabulary(self) -> int:
        """Number of source ids, tags included."""

    @property
    def target_vocabulary(self) -> int:
        """Number of target ids."""

    @property
    def length(self) -> int:
        """Tokens of a row of a batch, end token included."""

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """The training batch of a step: ``source`` and ``target``, int32 [B, L]."""

    def held_out(self, part: str = "dev") -> Sequence[Mapping[str, np.ndarray]]:
        """Batches of a part that is not trained on, of the same shape."""

    def has(self, part: str) -> bool:
        """Whether the corpus has pairs of a part."""

    def examples(self, count: int, part: str = "test", each: int | None = None) -> Sequence[Example]:
        """Sentences of a held-out part, always the same ones, of as many languages as there are."""

    def target_counts(self) -> np.ndarray:
        """How often each target id occurs in the training data, int64 [target_vocabulary]."""

    def frequent_sentence(self) -> str:
        """The most frequent English sentence of the training data."""

    @property
    def languages(self) -> Mapping[str, int]:
        """The number of pairs of each language."""

    def tag(self, language: str) -> int:
        """The source id that names a language, in front of a sentence."""

    def of_languages(self, languages: Sequence[str]) -> Text:
        """The same vocabularies, and these languages only."""

    def source_ids(self, sentence: str) -> list[int]:
        """The ids of a source sentence, without an end token."""

    def english(self, ids: Sequence[int]) -> str:
        """The text of target ids."""


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
    """

    hypotheses: tuple[Hypothesis, ...] = ()
    cut: bool = False
    tokens: int = 0

    @property
    def text(self) -> str:
        """The best translation; empty for an empty sentence."""
        return self.hypotheses[0].text if self.hypotheses else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Translator:
    """A trained model and its vocabularies.

    A sentence is padded to a width that depends on its own length only, and translated among ``batch`` sentences of
    that width, made up if need be. Every batch of a width runs the same compiled program, in which rows do not see each
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
    text: Text
    options: DecodeConfig
    batch: int = 32
    devices: int = 1

    @property
    def languages(self) -> Mapping[str, int]:
        """The languages the model was trained on, with the number of training pairs of each, largest first."""
        found = self.text.languages
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def check_language(self, language: str) -> str:
        """The name of a language in this corpus.

        Raises:
            TranslateError: the model was not trained on it.
        """
        known = self.languages
        by_folded = {name.casefold().replace("-", "_"): name for name in known}
        folded = language.casefold().replace("-", "_")
        if folded in by_folded:
            return by_folded[folded]
        merged = canonical(language)  # de-AT is de, iw is he
        if merged is not None and merged in known:
            return merged
        near = difflib.get_close_matches(folded, by_folded, cutoff=0.5)
        near += [name for name in by_folded if name.split("_")[0] == folded.split("_")[0] and name not in near]
        raise TranslateError(
            f"the model knows no language {language!r}.",
            got=f"{len(known)} languages: {', '.join(list(known)[:12])}{', ...' if len(known) > 12 else ''}",
            way_out=f"Did you mean {' or '.join(by_folded[n] for n in near[:3])}?" if near else "Leave --from out.",
        )

    def translate(
        self, sentences: Sequence[str], languages: Sequence[str | None] | str | None = None
    ) -> list[Translated]:
        """Translates any number of sentences; an empty one stays empty, and the order is kept.

        Args:
            sentences: what to translate.
            languages: the language of all of them, or of each, as `check_language` returns it; None where the model is
                to tell by itself.

        Raises:
            TranslateError: the model gives no finite probability to any translation.
        """
        if languages is None or isinstance(languages, str):
            languages = [languages] * len(sentences)
        tags = [[] if name is None else [self.text.tag(name)] for name in languages]
        room = self.text.length - 1
        # A piece has 16 letters at most: what lies behind could only be cut off.
        shown = [sentence[: 32 * self.text.length] for sentence in sentences]
        own = [self.text.source_ids(sentence) for sentence in shown]
        ids = [tag + row if row else [] for tag, row in zip(tags, own, strict=True)]
        out = [
            Translated((), len(row) > room or len(seen) < len(given), min(len(row), room) + 1 if row else 0)
            for row, seen, given in zip(ids, shown, sentences, strict=True)
        ]
        run = make_decode(self.model, self.options, self.devices)
        by_width: dict[int, list[int]] = {}
        for i, row in enumerate(ids):
            if row:
                by_width.setdefault(_width(out[i].tokens, self.text.length), []).append(i)
        for width, waiting in sorted(by_width.items()):
            for begin in range(0, len(waiting), self.batch):
                rows = waiting[begin : begin + self.batch]
                source_BL = np.full((self.batch, width), PAD, np.int32)
                for place, i in enumerate(rows):
                    kept = [*ids[i][:room], EOS]
                    source_BL[place, : len(kept)] = kept
                source_BL[len(rows) :] = source_BL[0]  # thrown away, and no longer on the way than a real one
                found = jax.device_get(run(self.params, source_BL))
                for place, i in enumerate(rows):
                    hypotheses = self._hypotheses(found.tokens_BNT[place], found.score_BN[place])
                    out[i] = dataclasses.replace(out[i], hypotheses=hypotheses)
        return out

    def _hypotheses(self, tokens_NT: np.ndarray, score_N: np.ndarray) -> tuple[Hypothesis, ...]:
        if not np.isfinite(score_N[0]):
            raise TranslateError(
                "the model gives no finite probability to any translation.",
                got=f"score {score_N[0]}",
                way_out="The run has diverged: use an earlier checkpoint with --step, or train again.",
            )
        # Bytes that spell a line break must not become one: lines out are lines in.
        texts = [" ".join(self.text.english(ids_of(tokens_T)).split()) for tokens_T in tokens_NT]
        return tuple(Hypothesis(t, float(s)) for t, s in zip(texts, score_N, strict=True) if np.isfinite(s))


def _width(tokens: int, longest: int) -> int:
    """Tokens of the rows that a source is padded to: a power of two from 16 on, or the longest."""
    return min(max(16, 1 << (tokens - 1).bit_length()), longest)


def load(
    run: Run, text: Text, options: DecodeConfig, step: int | None = None, *, batch: int = 32, devices: int = 1
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
        raise TranslateError(f"cannot translate {batch} sentences at a time.", way_out="Use --batch 1 or more.")
    if step is None:
        step, state, meta, _ = checkpoint.restore_newest_sound(run.checkpoints)
    else:
        step, state, meta = checkpoint.restore(run.checkpoints, step)
    if meta.get("vocabularies") != text.fingerprint:
        raise TranslateError(
            "the model was trained with other vocabularies.",
            where=str(run.checkpoints),
            got=f"vocabularies: {meta.get('vocabularies')} of the model, {text.fingerprint} of the corpus",
            way_out="Name the folder of the corpus it was trained on, or train again.",
        )
    if meta.get("only"):
        text = text.of_languages(meta["only"])
    model = moe.TransformerConfig(**meta["model"])
    # On one device the parameters go there now; on several, each takes its part when the search is first run.
    params = jax.device_put(state["params"], jax.devices()[0]) if devices == 1 else state["params"]
    return Translator(model, params, text, options, batch, devices)
