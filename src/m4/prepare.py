"""Prepare: from packages and files to a folder that training reads.

    manifest.json                   what was asked for and what came of it: sources, licences, hashes, counts
    train.tsv  dev.tsv  test.tsv    language, foreign sentence, English sentence
    rejected.tsv                    lines of the user's own files that are no pairs, and why
    source.model  target.model      vocabularies
    train.npz  dev.npz              the pairs as ids

The folder appears at once, complete, or not at all; preparing the same again does nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.batches import Encoded
from m4.corpus import hold_out, parallel
from m4.corpus.clean import clean
from m4.corpus.fetch import fetch
from m4.corpus.pair import Pair
from m4.corpus.source import chosen
from m4.errors import CorpusError
from m4.text import MANIFEST, PreparedText, read_manifest
from m4.tokens import Vocabulary, learn

FORMAT = 1
_SENTENCES_FOR_VOCABULARY = 200_000


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """What to prepare.

    Attributes:
        output: the folder to make.
        cache: where downloaded packages are kept.
        sources: packages to take translations from: django, wagtail, homeassistant.
        files: parallel text of your own: .tsv (language, foreign, English), .jsonl, or talk.de beside talk.en.
        source_vocabulary: ids of the vocabulary of all source languages; by default 8000, or what the text supports.
        target_vocabulary: ids of the English vocabulary; by default 4000, or what the text supports.
        temperature: 1 trains on languages as often as they occur, larger values on rare ones more often.
        tokens: tokens of a training batch on each side.
        length: the longest sentence, in tokens, end included.
        dev: share of English sentences held out to watch training.
        test: share of English sentences held out to score translations.
        sampling_seed: of the order of training.
    """

    output: Path = Path("data/quick-start")
    cache: Path = Path.home() / ".cache" / "m4"
    sources: tuple[str, ...] = ("django", "wagtail", "homeassistant")
    files: tuple[Path, ...] = ()
    source_vocabulary: int | None = None
    target_vocabulary: int | None = None
    temperature: float = 2.0
    tokens: int = 3072
    length: int = 24
    dev: float = 0.015
    test: float = 0.03
    sampling_seed: int = 0

    def __post_init__(self) -> None:
        if not (self.dev > 0 and self.test > 0 and self.dev + self.test <= 0.5):
            raise CorpusError(
                f"cannot hold out shares of {self.dev} and {self.test}.", way_out="Both above 0, together at most 0.5."
            )
        if self.length < 4 or self.tokens < self.length:
            raise CorpusError(f"batches of {self.tokens} tokens cannot hold sentences of {self.length}.")
        if self.temperature < 1:
            raise CorpusError(f"a temperature of {self.temperature} makes no sense.", way_out="Use 1 or more.")
        if not self.sources and not self.files:
            raise CorpusError("there is nothing to prepare.", way_out="Name a source or a file.")

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the result depends on."""
        said = {**dataclasses.asdict(self), "format": FORMAT, "output": "", "cache": ""}
        said["files"] = [(str(f), _stamp(f)) for f in self.files]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat() if file.exists() else None
    return (found.st_size, found.st_mtime_ns) if found else (0, 0)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What came of it; print it.

    Attributes:
        manifest: the contents of manifest.json.
        was_there: whether the folder had been prepared already.
    """

    manifest: dict[str, Any]
    was_there: bool

    def __str__(self) -> str:
        m = self.manifest
        lines = [f"corpus in {m['folder']}{' (prepared before)' if self.was_there else ''}"]
        for s in m["sources"]:
            if s["problem"]:
                lines.append(f"  {s['name']} {s['version']}: not to be had, going on without it ({s['problem']})")
            else:
                counts = f"{s['pairs']:,} pairs in {s['languages']} languages"
                lines.append(f"  {s['name']} {s['version']} ({s['licence']}): {counts}")
        for f in m["files"]:
            lines.append(f"  {f['path']}: {f['pairs']:,} pairs, {f['rejected']:,} lines rejected (rejected.tsv)")
        left_out = ", ".join(f"{n:,} {reason}" for reason, n in m["left_out"].items())
        lines.append(f"  left out: {left_out}")
        largest = ", ".join(f"{name} {n:,}" for name, n in list(m["languages"].items())[:8])
        lines.append(f"  {len(m['languages'])} languages; the largest: {largest}")
        parts = ", ".join(f"{p} {m['pairs'][p]:,}" for p in (hold_out.TRAIN, hold_out.DEV, hold_out.TEST))
        lines.append(f"  pairs: {parts}; {m['english']:,} different English sentences, no one in two parts")
        lines.append(f"  vocabularies: {m['source_vocabulary']:,} and {m['target_vocabulary']:,} pieces")
        return "\n".join(lines)


def prepare(config: PrepareConfig) -> Prepared:
    """Downloads, cleans, splits, learns vocabularies, and writes it all down.

    Raises:
        CorpusError: there is no text, or a file of the user's cannot be read.
        VocabularyError: the text does not support vocabularies of the size that was asked for.
    """
    known = read_manifest(config.output)
    if known is not None and known.get("fingerprint") == config.fingerprint:
        return Prepared({**known, "folder": str(config.output)}, was_there=True)
    for file in config.files:
        parallel.read(file)  # what cannot be read is said before anything is downloaded
    work = config.output.with_name(config.output.name + ".unfinished")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    left_out: Counter[str] = Counter()
    pairs: dict[Pair, None] = {}
    sources = list(_from_sources(config, pairs, left_out))
    files = list(_from_files(config, pairs, left_out, work))
    if not pairs:
        raise CorpusError(
            "there is not one pair of sentences to train on.",
            got="; ".join(s["problem"] for s in sources if s["problem"]) or None,
            way_out="Check the connection to the package index, or give text of your own with --files.",
        )
    manifest = {
        "fingerprint": config.fingerprint, "format": FORMAT, "sources": sources, "files": files,
        "left_out": dict(left_out.most_common()),
        "settings": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        **_write_parts(list(pairs), config, work),
    }  # fmt: skip
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if config.output.exists():
        shutil.rmtree(config.output)
    work.rename(config.output)
    return Prepared({**manifest, "folder": str(config.output)}, was_there=False)


def open_text(folder: Path) -> PreparedText:
    """The corpus that was prepared in a folder.

    Raises:
        CorpusError: there is none.
    """
    return PreparedText.load(folder)


def _from_sources(config: PrepareConfig, pairs: dict[Pair, None], left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    config.cache.mkdir(parents=True, exist_ok=True)
    for source in chosen(config.sources):
        got = fetch(source, config.cache)
        found = {
            "name": source.name, "version": source.version, "licence": source.licence, "sha256": got.sha256,
            "archive": got.archive.name if got.archive else None, "problem": got.problem, "pairs": 0, "languages": 0,
        }  # fmt: skip
        if got.archive is not None:
            before = len(pairs)
            languages = _keep(source.read(got.archive), pairs, left_out)
            found |= {"pairs": len(pairs) - before, "languages": len(languages)}
        yield found


def _from_files(
    config: PrepareConfig, pairs: dict[Pair, None], left_out: Counter[str], work: Path
) -> Iterator[dict[str, Any]]:
    with (work / "rejected.tsv").open("w", encoding="utf-8") as aside:
        for path in config.files:
            before, rejected, good = len(pairs), 0, []
            for item in parallel.read(path):
                if isinstance(item, parallel.BadLine):
                    rejected += 1
                    aside.write(f"{path}:{item.number}\t{item.reason}\t{item.text}\n")
                else:
                    good.append(item)
            _keep(good, pairs, left_out)
            yield {"path": str(path), "pairs": len(pairs) - before, "rejected": rejected}


def _keep(found: Iterable[Pair], pairs: dict[Pair, None], left_out: Counter[str]) -> set[str]:
    """Adds the pairs worth training on, each once; counts why others are left out."""
    languages = set()
    for pair in found:
        cleaned = clean(pair)
        if isinstance(cleaned, str):
            left_out[cleaned] += 1
        elif cleaned in pairs:
            left_out["the same again"] += 1
        else:
            pairs[cleaned] = None
            languages.add(cleaned.language)
    return languages


def _write_parts(pairs: list[Pair], config: PrepareConfig, work: Path) -> dict[str, Any]:
    part_of = hold_out.parts((hold_out.key(p.english) for p in pairs), config.dev, config.test)
    parts: dict[str, list[Pair]] = {hold_out.TRAIN: [], hold_out.DEV: [], hold_out.TEST: []}
    for pair in pairs:
        parts[part_of[hold_out.key(pair.english)]].append(pair)
    for name, members in parts.items():
        if not members:
            raise CorpusError(
                f"too little text: not one sentence for the {name} part.",
                got=f"{len(pairs):,} pairs with {len(part_of):,} different English sentences",
                way_out="Give more text, or hold out a larger share with --dev and --test.",
            )
        with (work / f"{name}.tsv").open("w", encoding="utf-8") as out:
            out.writelines("\t".join(p) + "\n" for p in members)
    train = parts[hold_out.TRAIN]
    rng = np.random.default_rng(config.sampling_seed)
    source = learn(_sample(train, config.temperature, rng), config.source_vocabulary, 8000, "source")
    target = learn({p.english for p in train}, config.target_vocabulary, 4000, "target")
    (work / "source.model").write_bytes(source.model)
    (work / "target.model").write_bytes(target.model)
    languages = Counter(p.language for p in pairs)
    for name in (hold_out.TRAIN, hold_out.DEV):
        _encode(parts[name], source, target, work / f"{name}.npz")
    return {
        "pairs": {name: len(members) for name, members in parts.items()},
        "languages": dict(languages.most_common()),
        "english": len(part_of),
        "source_vocabulary": source.size,
        "target_vocabulary": target.size,
        "models": {"source": source.sha256, "target": target.sha256},
    }


def _sample(pairs: Sequence[Pair], temperature: float, rng: np.random.Generator) -> list[str]:
    """Foreign sentences for the vocabulary, rare languages more often than they occur."""
    counts = Counter(p.language for p in pairs)
    if len(pairs) <= 1000:
        return [p.foreign for p in pairs]
    weight = {name: n ** (1 / temperature) / n for name, n in counts.items()}
    chance = np.array([weight[p.language] for p in pairs])
    size = min(len(pairs), _SENTENCES_FOR_VOCABULARY)
    picked = rng.choice(len(pairs), size, replace=True, p=chance / chance.sum())
    return [pairs[i].foreign for i in np.sort(picked)]


def _encode(pairs: Sequence[Pair], source: Vocabulary, target: Vocabulary, path: Path) -> None:
    languages = tuple(sorted({p.language for p in pairs}))
    number = {name: i for i, name in enumerate(languages)}
    foreign, english = source.encode([p.foreign for p in pairs]), target.encode([p.english for p in pairs])
    encoded = Encoded(
        languages,
        np.array([number[p.language] for p in pairs], np.int32),
        np.array([i for ids in foreign for i in ids], np.int32),
        np.array([i for ids in english for i in ids], np.int32),
        np.concatenate([[0], np.cumsum([len(ids) for ids in foreign])]).astype(np.int64),
        np.concatenate([[0], np.cumsum([len(ids) for ids in english])]).astype(np.int64),
    )
    fields: dict[str, Any] = {f.name: np.asarray(getattr(encoded, f.name)) for f in dataclasses.fields(encoded)}
    np.savez(path, **fields)
