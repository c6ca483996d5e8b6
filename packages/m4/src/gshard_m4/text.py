"""PreparedText: a prepared corpus, as training, translating and scoring ask for it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gshard_m4.batches import Batches, in_order
from gshard_m4.corpus import hold_out
from gshard_m4.corpus.hold_out import DEV, TRAIN
from gshard_m4.corpus.near_twins import NearTwins
from gshard_m4.corpus.pair import Pair, rows
from gshard_m4.encoded import Encoded, of_languages
from gshard_m4.errors import CorpusError
from gshard_m4.tokens import Vocabulary

DATA = Path("data/quick-start")
"""The folder of the corpus that `gshard-m4 prepare` makes by default."""

MANIFEST = "manifest.json"
_WATCHED = 2000  # pairs that training is watched on


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
        only: the languages to train on, watch and score; all of the corpus if empty. The vocabularies are the same.
    """

    folder: Path
    manifest: dict[str, Any]
    source: Vocabulary
    target: Vocabulary
    only: tuple[str, ...] = ()

    @staticmethod
    def load(folder: Path) -> PreparedText:
        """Opens a folder that ``gshard-m4 prepare`` made.

        Raises:
            CorpusError: there is no prepared corpus.
            VocabularyError: a vocabulary is damaged.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            others = sorted(str(path.parent) for path in folder.parent.glob(f"*/{MANIFEST}"))
            there = f" There are: {', '.join(others)}." if others else ""
            hint = f"Run gshard-m4 prepare, or name the folder that it made.{there}"
            raise CorpusError("there is no prepared corpus.", str(folder), hint=hint)
        models = manifest["models"]
        source = Vocabulary.load(folder / "source.model", models["source"])
        return PreparedText(folder, manifest, source, Vocabulary.load(folder / "target.model", models["target"]))

    @property
    def fingerprint(self) -> str:
        """Hash of both vocabularies, the names of languages included."""
        said = json.dumps([self.source.sha256, self.target.sha256, self.tag_names])
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def digest(self) -> str:
        """Hash of all that the batches follow from: the corpus and how they are drawn."""
        return hashlib.sha256(json.dumps([self.manifest, self.only], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tag_names(self) -> list[str]:
        """The languages in the order of their tags; those of another corpus if its vocabularies were kept."""
        return list(self.manifest.get("tags") or sorted(self.manifest["languages"]))

    @property
    def languages(self) -> dict[str, int]:
        """The languages to train on, with the number of pairs of each."""
        found: dict[str, int] = self.manifest["languages"]
        return {name: found[name] for name in found if not self.only or name in self.only}

    @property
    def source_vocabulary(self) -> int:
        """Number of source ids: the pieces, and after them a tag for each language."""
        return self.source.size + len(self.tag_names)

    def tag(self, language: str) -> int:
        """The source id that names a language, in front of a sentence."""
        return self.source.size + self.tag_names.index(language)

    @property
    def target_vocabulary(self) -> int:
        """Number of target ids."""
        return self.target.size

    @property
    def length(self) -> int:
        """Tokens of the longest row, end included."""
        return int(self.manifest["settings"]["length"])

    @property
    def temperature(self) -> float:
        """How languages are drawn: 1 as often as they occur, larger values rare ones more often."""
        return float(self.manifest["settings"]["temperature"])

    @functools.cached_property
    def batches(self) -> Batches:
        """The training batches."""
        s = self.manifest["settings"]
        data = self._encoded("train")
        tags = tuple(self.tag(name) for name in data.languages)
        return Batches(data, int(s["tokens"]), self.length, self.temperature, int(s["sampling_seed"]), tags)

    def batch(self, step: int, process: int = 0, processes: int = 1) -> dict[str, np.ndarray]:
        """The training batch of a step, or a process's part of it: ``source`` and ``target``, int32 [B, L]."""
        return self.batches.batch(step, process, processes)

    def rebatched(self, **settings: float | None) -> PreparedText:
        """The same text in other batches than it was prepared for.

        Args:
            settings: ``tokens``, ``length``, ``temperature``, ``sampling_seed``; see
                `gshard_m4.prepare_config.PrepareConfig`. Those that are None stay.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        changed = {**self.manifest["settings"], **given}
        return dataclasses.replace(self, manifest={**self.manifest, "settings": changed})

    def of_languages(self, languages: Sequence[str]) -> PreparedText:
        """The same text with these languages only; its vocabularies, and so the ids, stay what they are.

        Raises:
            CorpusError: the corpus has no such language.
        """
        unknown = [name for name in languages if name not in self.languages]
        if unknown:
            raise CorpusError(
                f"there is no language {unknown[0]!r} here.",
                str(self.folder),
                hint=f"There are: {', '.join(sorted(self.languages))}.",
            )
        return dataclasses.replace(self, only=tuple(languages))

    def held_out(self, part: str = DEV) -> Sequence[dict[str, np.ndarray]]:
        """Batches that are not trained on, all of one shape.

        Args:
            part: ``dev`` or ``known_dev``; none of the latter where the corpus has none.
        """
        data = self._encoded(part) if self.has(part) else self._encoded(TRAIN).only([])
        # A sample that is quickly evaluated, with all languages in it.
        picked = np.random.default_rng(0).permutation(len(data))[:_WATCHED]
        return tuple(in_order(data.only(np.sort(picked)), self.batches.shape, self.length))

    def has(self, part: str) -> bool:
        """Whether there are pairs of a part; corpora of earlier versions have none with known English."""
        return bool(self.manifest["pairs"].get(part))

    def examples(self, count: int | None = None, part: str = "test", each: int | None = None) -> Sequence[Pair]:
        """Held-out sentences of any length, always the same ones, of as many languages as there are.

        The first ones of a language are the same whatever other languages there are, and however many are asked for.

        Args:
            count: how many at most; None for all.
            part: ``test``, ``known_test``, ``dev`` or ``known_dev``; empty where the corpus has none.
            each: how many at most of each language.
        """
        by_language: dict[str, list[Pair]] = {}
        for pair in self._pairs(part) if self.has(part) else ():
            by_language.setdefault(pair.language, []).append(pair)
        queues = []
        for name, own in sorted(by_language.items()):
            shuffled = np.random.default_rng((1, zlib.crc32(name.encode()))).permutation(len(own))
            queues.append([own[i] for i in shuffled[:each]])
        order = np.random.default_rng(1).permutation(len(queues))
        found: list[Pair] = []
        for turn in range(max(map(len, queues), default=0)):
            for q in order:
                if turn < len(queues[q]):
                    found.append(queues[q][turn])
        return found[:count]

    def near_twins(self, english: Sequence[str]) -> list[bool]:
        """For each English sentence, whether training has a near twin of it (`gshard_m4.corpus.near_twins`)."""
        has = functools.cache(self._trained_english.has)
        return [has(hold_out.key(sentence)) for sentence in english]

    @functools.cached_property
    def _trained_english(self) -> NearTwins:
        return NearTwins({hold_out.key(pair.english) for pair in self._pairs(TRAIN)})

    def frequent_sentence(self) -> str:
        """The most frequent English sentence of the training data."""
        return str(self.manifest["frequent_sentence"])

    def source_ids(self, sentence: str) -> list[int]:
        """The ids of a source sentence, without an end token."""
        return self.source.encode([sentence])[0]

    def english(self, ids: Sequence[int]) -> str:
        """The text of target ids."""
        return self.target.decode(ids)

    def spelt_in_bytes(self, ids: Sequence[int]) -> float:
        """The share of source ids that are single bytes: of letters that the training text hardly has."""
        return sum(map(self.source.processor.is_byte, ids)) / max(len(ids), 1)

    def target_ids(self, text: str) -> list[int]:
        """The target ids of a text, without an end token."""
        return self.target.encode([text])[0]

    def _encoded(self, part: str) -> Encoded:
        found = Encoded.load(self.folder / part)
        return of_languages(found, self.only) if self.only else found

    def _pairs(self, part: str) -> Iterator[Pair]:
        path = self.folder / f"{part}.tsv"
        try:
            for cells in rows(path):
                pair = Pair(*cells)
                if not self.only or pair.language in self.only:
                    yield pair
        except (OSError, ValueError, TypeError) as error:
            hint = "Delete the folder and run gshard-m4 prepare again."
            raise CorpusError("a file of the corpus is missing or damaged.", str(path), str(error), hint) from error
