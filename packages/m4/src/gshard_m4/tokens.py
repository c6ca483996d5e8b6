"""Vocabularies: SentencePiece, one over all source languages, one for English.

Ids: 0 padding, 1 end of sentence, 2 unknown. Rare characters are spelt in bytes, so nothing is ever unknown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from gshard_m4.errors import VocabularyError

_SMALLEST = 300  # bytes, marks and a few letters
_LONGEST_LINE = 4000  # SentencePiece skips longer ones


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Pieces of words and their ids.

    Attributes:
        model: SentencePiece's model file.
    """

    model: bytes
    processor: sentencepiece.SentencePieceProcessor = dataclasses.field(repr=False, compare=False)

    @staticmethod
    def load(path: Path, sha256: str | None = None) -> Vocabulary:
        """Reads a vocabulary and checks that it is the one that was written.

        Raises:
            VocabularyError: the file is missing or damaged.
        """
        try:
            model = path.read_bytes()
        except OSError as error:
            raise VocabularyError(f"the vocabulary cannot be read: {error.strerror}.", str(path)) from error
        if sha256 is not None and hashlib.sha256(model).hexdigest() != sha256:
            raise VocabularyError(
                "the vocabulary is not the one that was learnt here.", str(path), hint="Run gshard-m4 prepare again."
            )
        return _of(model)

    @property
    def size(self) -> int:
        """Number of ids."""
        return int(self.processor.vocab_size())

    @property
    def sha256(self) -> str:
        """Hash of the model file."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Ids of each sentence, without an end."""
        return [list(ids) for ids in self.processor.encode(list(sentences), num_threads=2)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return str(self.processor.decode([int(i) for i in ids]))


def learn(sentences: Iterable[str], size: int | None, default: int, what: str) -> Vocabulary:
    """Learns a vocabulary of pieces (the unigram model).

    Args:
        sentences: the text.
        size: number of ids; None takes ``default``, or as many as the text supports if that is fewer.
        default: see ``size``.
        what: its side, for messages.

    Raises:
        VocabularyError: there is no text, or it does not support that many pieces.

    >>> letters = "abcdefghijklmnopqrstuvwxyz"
    >>> learn([f"{a}{b}{c} {c}{a}{b}" for a in letters for b in letters for c in letters], 400, 8000, "source").size
    400
    """
    lines = [line for line in sentences if line and len(line.encode()) <= _LONGEST_LINE]
    if not lines:
        raise VocabularyError(f"there is no text to learn the {what} vocabulary from.")
    wanted = default if size is None else size
    if wanted < _SMALLEST:
        raise VocabularyError(f"a {what} vocabulary of {wanted} is too small.", hint=f"Ask for at least {_SMALLEST}.")
    try:
        return _train(lines, wanted)
    except RuntimeError as error:
        found = re.search(r"value <= (\d+)", str(error))
        least = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if least is not None:
            raise VocabularyError(
                f"a {what} vocabulary of {wanted} is too small: the text has more letters than that.",
                got=f"{len(lines):,} sentences",
                hint=f"Ask for more than {least.group(1)}.",
            ) from error
        if found is None:
            raise VocabularyError(f"the {what} vocabulary could not be learnt: {error}") from error
        most = int(found.group(1))
        if size is not None:
            raise VocabularyError(
                f"a {what} vocabulary of {size} is larger than the text supports.",
                got=f"{len(lines):,} sentences",
                hint=f"Ask for at most {most}, or give more text.",
            ) from error
        return _train(lines, most)


def _train(lines: list[str], size: int) -> Vocabulary:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=size,
        model_type="unigram",
        character_coverage=0.9995,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=2,
        minloglevel=2,
    )
    return _of(written.getvalue())


def _of(model: bytes) -> Vocabulary:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except RuntimeError as error:
        raise VocabularyError(f"this is no vocabulary: {error}", hint="Run gshard-m4 prepare again.") from error
    return Vocabulary(model, processor)
