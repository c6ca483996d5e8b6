"""From sentences to sentences: vocabularies around the search.

`Text` is all that training and translating ask of a prepared corpus. A `Translator` is a trained model with the
vocabularies it was trained with; it splits any number of sentences into batches of one shape, so that the search is
compiled once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from gshard import GShardError, moe
from m4 import checkpoint
from m4.config import Run
from m4.decode import EOS, PAD, DecodeConfig, decode, ids_of


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
    def source_vocabulary(self) -> int:
        """Number of source ids."""

    @property
    def target_vocabulary(self) -> int:
        """Number of target ids."""

    @property
    def length(self) -> int:
        """Tokens of a row of a batch, end token included."""

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """The training batch of a step: ``source`` and ``target``, int32 [B, L]."""

    def held_out(self) -> Sequence[Mapping[str, np.ndarray]]:
        """Batches that are not trained on, of the same shape."""

    def examples(self, count: int) -> Sequence[Example]:
        """Held-out sentences, always the same ones, of as many languages as there are."""

    def target_counts(self) -> np.ndarray:
        """How often each target id occurs in the training data, int64 [target_vocabulary]."""

    def frequent_sentence(self) -> str:
        """The most frequent English sentence of the training data."""

    def source_ids(self, sentence: str) -> list[int]:
        """The ids of a source sentence, without an end token."""

    def english(self, ids: Sequence[int]) -> str:
        """The text of target ids."""


@dataclasses.dataclass(frozen=True, slots=True)
class Translated:
    """One translation.

    Attributes:
        text: the English sentence.
        cut: whether the source was longer than the model reads and its end was not read.
    """

    text: str
    cut: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Translator:
    """A trained model and its vocabularies.

    Attributes:
        model: its configuration.
        params: its parameters.
        text: the vocabularies.
        options: how to search.
        batch: sentences that are translated together.
    """

    model: moe.TransformerConfig
    params: Any
    text: Text
    options: DecodeConfig
    batch: int = 32

    def translate(self, sentences: Sequence[str]) -> list[Translated]:
        """Translates any number of sentences; an empty one stays empty, and the order is kept."""
        ids = [self.text.source_ids(sentence) for sentence in sentences]
        room = self.text.length - 1
        out = [Translated("", len(row) > room) for row in ids]
        # Neighbours of similar length end together; nothing else depends on the order.
        waiting = sorted((i for i, row in enumerate(ids) if row), key=lambda i: len(ids[i]))
        for begin in range(0, len(waiting), self.batch):
            rows = waiting[begin : begin + self.batch]
            source_BL = np.full((self.batch, self.text.length), PAD, np.int32)
            for place, i in enumerate(rows):
                kept = [*ids[i][:room], EOS]
                source_BL[place, : len(kept)] = kept
            source_BL[len(rows) :] = source_BL[0]  # rows that are thrown away, and take no longer than a real one
            tokens_BT = np.asarray(decode(self.model, self.params, source_BL, self.options).tokens_BNT)[:, 0]
            for place, i in enumerate(rows):
                out[i] = dataclasses.replace(out[i], text=self.text.english(ids_of(tokens_BT[place])))
        return out


def load(run: Run, text: Text, options: DecodeConfig, step: int | None = None) -> Translator:
    """The translator of a finished run.

    Args:
        run: the folder it was trained in.
        text: the corpus it was trained on.
        options: how to search.
        step: which checkpoint; the newest that is sound if None.

    Raises:
        CheckpointError: there is no such checkpoint, or none is sound.
        TranslateError: the vocabularies are not those of the run.
    """
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
    model = moe.TransformerConfig(**meta["model"])
    params = jax.device_put(state["params"], jax.devices()[0])
    return Translator(model, params, text, options)
