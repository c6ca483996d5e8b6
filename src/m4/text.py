"""PreparedText: a prepared corpus, as training, translating and scoring ask for it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.batches import Batches, in_order
from m4.corpus.pair import Pair
from m4.encoded import Encoded
from m4.errors import CorpusError
from m4.tokens import Vocabulary
from m4.translate import Example

MANIFEST = "manifest.json"
_BLOCK = 1 << 24


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared corpus; None if there is none, or it is damaged or that of something else."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"fingerprint", "models", "settings"} <= found.keys() else None


@dataclasses.dataclass(frozen=True)
class PreparedText:
    """A prepared corpus.

    Attributes:
        folder: where it lies.
        manifest: what is written down of it.
        source, target: the vocabularies.
    """

    folder: Path
    manifest: dict[str, Any]
    source: Vocabulary
    target: Vocabulary

    @staticmethod
    def load(folder: Path) -> PreparedText:
        """Opens a folder that ``m4 prepare`` made.

        Raises:
            CorpusError: there is no prepared corpus.
            VocabularyError: a vocabulary is damaged.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            way_out = "Run m4 prepare, or name the folder that it made."
            raise CorpusError("there is no prepared corpus.", str(folder), way_out=way_out)
        models = manifest["models"]
        source = Vocabulary.load(folder / "source.model", models["source"])
        return PreparedText(folder, manifest, source, Vocabulary.load(folder / "target.model", models["target"]))

    @property
    def fingerprint(self) -> str:
        """Hash of both vocabularies."""
        return hashlib.sha256((self.source.sha256 + self.target.sha256).encode()).hexdigest()

    @property
    def source_vocabulary(self) -> int:
        """Number of source ids."""
        return self.source.size

    @property
    def target_vocabulary(self) -> int:
        """Number of target ids."""
        return self.target.size

    @property
    def length(self) -> int:
        """Tokens of the longest row, end included."""
        return int(self.manifest["settings"]["length"])

    @functools.cached_property
    def batches(self) -> Batches:
        """The training batches."""
        s = self.manifest["settings"]
        seed, temperature = int(s["sampling_seed"]), float(s["temperature"])
        return Batches(self._encoded("train"), int(s["tokens"]), self.length, temperature, seed)

    def batch(self, step: int, process: int = 0, processes: int = 1) -> dict[str, np.ndarray]:
        """The training batch of a step, or a process's part of it: ``source`` and ``target``, int32 [B, L]."""
        return self.batches.batch(step, process, processes)

    def rebatched(
        self, *, tokens: int | None = None, length: int | None = None, temperature: float | None = None,
        seed: int | None = None,
    ) -> PreparedText:  # fmt: skip
        """The same text in other batches than it was prepared for; see `m4.prepare.PrepareConfig`."""
        asked = {"tokens": tokens, "length": length, "temperature": temperature, "sampling_seed": seed}
        settings = {**self.manifest["settings"], **{name: value for name, value in asked.items() if value is not None}}
        return dataclasses.replace(self, manifest={**self.manifest, "settings": settings})

    @functools.cached_property
    def _held_out(self) -> tuple[dict[str, np.ndarray], ...]:
        rows = int(self.manifest["settings"]["tokens"]) // self.length
        dev = self._encoded("dev")
        # A sample that is quickly evaluated: every n-th pair, all languages in it.
        picked = np.random.default_rng(0).permutation(len(dev))[: 8 * rows]
        return tuple(in_order(dev.only(np.sort(picked)), rows, self.length))

    def held_out(self) -> Sequence[dict[str, np.ndarray]]:
        """Batches that are not trained on, all of one shape."""
        return self._held_out

    def examples(self, count: int, part: str = "test") -> Sequence[Example]:
        """Held-out sentences that fit the model, always the same ones, of as many languages as there are.

        Args:
            count: how many at most.
            part: ``test``, ``dev``, or ``out_of_domain`` (empty unless the corpus has such a source).
        """
        pairs = self._pairs(part)
        sides = self.source.encode([p.foreign for p in pairs]), self.target.encode([p.english for p in pairs])
        by_language: dict[str, list[Pair]] = {}
        for pair, source, target in zip(pairs, *sides, strict=True):
            if max(len(source), len(target)) < self.length:
                by_language.setdefault(pair.language, []).append(pair)
        rng = np.random.default_rng(1)
        queues = [[pairs[i] for i in rng.permutation(len(pairs))] for _, pairs in sorted(by_language.items())]
        order = rng.permutation(len(queues))
        found: list[Example] = []
        for turn in range(max(map(len, queues), default=0)):
            for q in order:
                if turn < len(queues[q]) and len(found) < count:
                    found.append(Example(*queues[q][turn]))
        return found

    def target_counts(self) -> np.ndarray:
        """How often each target id occurs in the training data, end included, int64 [target_vocabulary]."""
        train = self._encoded("train")
        counts = np.zeros(self.target_vocabulary, np.int64)
        for start in range(0, len(train.target), _BLOCK):
            counts += np.bincount(train.target[start : start + _BLOCK], minlength=self.target_vocabulary)
        counts[1] += len(train)
        return counts

    def frequent_sentence(self) -> str:
        """The most frequent English sentence of the training data."""
        return str(self.manifest["frequent_sentence"])

    def source_ids(self, sentence: str) -> list[int]:
        """The ids of a source sentence, without an end token."""
        return self.source.encode([sentence])[0]

    def english(self, ids: Sequence[int]) -> str:
        """The text of target ids."""
        return self.target.decode(ids)

    def _encoded(self, part: str) -> Encoded:
        return Encoded.load(self.folder / part)

    def _pairs(self, part: str) -> list[Pair]:
        path = self.folder / f"{part}.tsv"
        try:
            return [Pair(*line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, TypeError) as error:
            way_out = "Delete the folder and run m4 prepare again."
            raise CorpusError("a file of the corpus is missing or damaged.", str(path), str(error), way_out) from error
