"""What to prepare, and the defaults of each tier."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_m4.batches import check_temperature
from gshard_m4.corpus import parallel
from gshard_m4.corpus.fetch import checksum
from gshard_m4.corpus.language import language as canonical
from gshard_m4.corpus.source import Licences, Source, Tier, chosen, of_tier
from gshard_m4.errors import CorpusError
from gshard_m4.language_names import code_of

FORMAT = 6
"""Raised when the same settings give another corpus than before."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The defaults of a tier; see `PrepareConfig`."""

    folder: str
    source_vocabulary: int
    target_vocabulary: int
    vocabulary_sentences: int
    temperature: float
    tokens: int
    length: int
    quota: int
    least: int
    languages: int | None
    known: int = 100


TIERS: Mapping[Tier, Defaults] = {
    "tiny": Defaults("quick-start", 8_000, 4_000, 200_000, 2.0, 3072, 24, 0, 1, None),
    "base": Defaults("base", 64_000, 32_000, 1_000_000, 5.0, 8192, 128, 300, 1000, 100),
}


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """What to prepare.

    Attributes:
        tier: which corpus: tiny (three packages, a minute), or base (60 sources), which
            needs Debian's apt and npm; what cannot be had is left out and told.
        output: the folder to make; by default data/quick-start or data/base.
        cache: where downloaded packages are kept, and what was read from them.
        sources: take translations from these sources instead of those of the tier.
        files: parallel text of your own: .tsv (language, foreign, English), .jsonl, .po, or talk.de beside talk.en.
        licences: ``permissive`` takes only sources whose licence asks for nothing but to be named.
        languages: keep so many languages, the largest; by default 100 of base, and all of tiny. Languages
            of your own files are always kept.
        only: keep these languages, by their codes or English names (de, German), instead of the largest.
        source_vocabulary: ids of the vocabulary of all source languages; by default 64000 (tiny: 8000), or what the
            text supports.
        target_vocabulary: ids of the English vocabulary; by default 32000 (tiny: 4000), or what the text supports.
        temperature: 1 trains on languages as often as they occur, larger values on rare ones more often; by default
            5 (tiny: 2).
        tokens: tokens of a training batch on each side; by default 8192 (tiny: 3072).
        length: the longest sentence, in tokens, end included; by default 128 (tiny: 24, or with files of your own what
            99 % of the pairs need, up to 128).
        quota: full sentences of each language that are held out for dev and for test, at most 8 % of what it has; by
            default 300. With 0, shares of all English sentences are held out instead (tiny).
        known: pairs of each language that are held out for dev and for test while other languages keep their English,
            at most 2 % of what it has; by default 100. They show what a language gains from the others.
        dev: share of English sentences held out to watch training, if there is no quota.
        test: share of English sentences held out to score translations, if there is no quota.
        dev_files: parallel text of your own to watch training with, in the forms of --files, instead of sentences that
            are held out. They are not cleaned; training uses none of their English sentences.
        test_files: the same to score translations with.
        vocabularies: folder of a prepared corpus whose vocabularies and languages are kept, to go on from a model that
            was trained on it (gshard-m4 train --from).
        sampling_seed: of the order of training.
        jobs: processes that read packages; by default as many as there are processors.
    """

    tier: Tier = "tiny"
    output: Path | None = None
    cache: Path = Path.home() / ".cache" / "m4"
    sources: tuple[str, ...] | None = None
    files: tuple[Path, ...] = ()
    licences: Licences = "all"
    languages: int | None = None
    only: tuple[str, ...] = ()
    source_vocabulary: int | None = None
    target_vocabulary: int | None = None
    temperature: float | None = None
    tokens: int | None = None
    length: int | None = None
    quota: int | None = None
    known: int | None = None
    dev: float = 0.015
    test: float = 0.03
    dev_files: tuple[Path, ...] = ()
    test_files: tuple[Path, ...] = ()
    vocabularies: Path | None = None
    sampling_seed: int = 0
    jobs: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", tuple(sorted({_code(name) for name in self.only})))
        settings = self.settings
        if not (self.dev > 0 and self.test > 0 and self.dev + self.test <= 0.5):
            raise CorpusError(
                f"cannot hold out shares of {self.dev} and {self.test}.", hint="Both above 0, together at most 0.5."
            )
        if settings["length"] < 4 or settings["tokens"] < settings["length"]:
            raise CorpusError(f"batches of {settings['tokens']} tokens cannot hold sentences of {settings['length']}.")
        check_temperature(settings["temperature"])
        if (
            min(settings["quota"], settings["known"]) < 0
            or (self.languages is not None and self.languages < 1)
            or self.jobs < 1
        ):
            raise CorpusError("a quota below 0, or fewer than one language or process, makes no sense.")
        if self.only and self.languages is not None:
            raise CorpusError(
                "languages are chosen by their names or by their number.",
                got=f"--only {' '.join(self.only)}, --languages {self.languages}",
                hint="Leave one of them out.",
            )
        if self.vocabularies is not None and (self.source_vocabulary or self.target_vocabulary):
            raise CorpusError(
                "vocabularies are kept or learnt, not both.",
                hint="Leave --vocabularies, or --source-vocabulary and --target-vocabulary, out.",
            )
        if not self.chosen_sources and not self.files:
            raise CorpusError("there is nothing to prepare.", hint="Name a source or a file.")

    @property
    def folder(self) -> Path:
        """The folder to make."""
        return self.output or Path("data") / TIERS[self.tier].folder

    @property
    def chosen_sources(self) -> list[Source]:
        """Sources to take translations from."""
        if self.sources is None:
            return of_tier(self.tier, self.licences)
        return chosen(self.sources, self.licences)

    @property
    def settings(self) -> dict[str, Any]:
        """What the result depends on, with the defaults of the tier filled in; without sources and files."""
        asked = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = TIERS[self.tier]
        filled = ("languages", "temperature", "tokens", "length", "quota", "known")
        asked |= {name: getattr(defaults, name) for name in filled if asked[name] is None}
        for name in ("output", "cache", "sources", "files", "dev_files", "test_files", "vocabularies", "jobs"):
            del asked[name]
        return asked if self.only else {name: value for name, value in asked.items() if name != "only"}

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the result depends on."""
        said: dict[str, Any] = {**self.settings, "format": FORMAT}
        said["sources"] = [(s.title, s.packages) for s in self.chosen_sources]
        said["files"] = _checksums(self.files)
        for name, files in (("dev_files", self.dev_files), ("test_files", self.test_files)):
            if files:
                said[name] = _checksums(files)
        if self.vocabularies is not None:
            models = [self.vocabularies / f"{side}.model" for side in ("source", "target")]
            said["vocabularies"] = [checksum(model) for model in models if model.is_file()]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _checksums(files: Sequence[Path]) -> list[list[tuple[str, str]]]:
    return [[(f.name, checksum(f)) for f in parallel.files_of(file) if f.is_file()] for file in files]


def _code(language: str) -> str:
    found = code_of(language) or canonical(language)
    if found is None:
        raise CorpusError(
            f"{language!r} is no language to translate from.", hint="Give codes or English names: de, German, pt_BR."
        )
    return found
