"""Prepare: from packages and files to a folder that training reads.

    manifest.json                   what was asked for and what came of it: sources, licences, hashes, counts
    train.tsv  dev.tsv  test.tsv    language, foreign sentence, English sentence
    rejected.tsv                    lines of the user's own files that are no pairs, and files of packages that
                                    cannot be read, each with the reason
    source.model  target.model      vocabularies
    train.npz  dev.npz              the pairs as ids

The folder appears at once, complete, or not at all: what was there before stays until then, and a corpus is never
replaced by one that lacks a package it had. Preparing the same again does nothing, except that packages that were not
to be had are asked for again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from m4.batches import Encoded
from m4.corpus import hold_out, parallel
from m4.corpus.clean import clean
from m4.corpus.fetch import Fetched, checksum, fetch
from m4.corpus.pair import Pair, Unreadable
from m4.corpus.source import chosen
from m4.errors import CorpusError
from m4.text import MANIFEST, PreparedText, read_manifest
from m4.tokens import Vocabulary, learn

FORMAT = 2
"""Raised when the same settings give another corpus than before."""

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
        said["sources"] = [(s.name, s.version) for s in chosen(self.sources)]
        said["files"] = [[(f.name, checksum(f)) for f in parallel.files_of(file) if f.is_file()] for file in self.files]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


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
                broken = f", {s['unreadable']:,} files cannot be read (rejected.tsv)" if s["unreadable"] else ""
                lines.append(f"  {s['name']} {s['version']} ({s['licence']}): {counts}{broken}")
        for f in m["files"]:
            lines.append(f"  {f['path']}: {f['pairs']:,} pairs, {f['rejected']:,} lines rejected (rejected.tsv)")
        lines += [f"    {n:,} lines with {reason}" for reason, n in list(m["rejected"].items())[:10]]
        left_out = ", ".join(_counts(Counter(m["left_out"])))
        lines.append(f"  left out: {left_out}")
        largest = ", ".join(f"{name} {n:,}" for name, n in list(m["languages"].items())[:8])
        lines.append(f"  {len(m['languages'])} languages; the largest: {largest}")
        parts = ", ".join(f"{p} {m['pairs'][p]:,}" for p in (hold_out.TRAIN, hold_out.DEV, hold_out.TEST))
        lines.append(f"  pairs: {parts}; {m['english']:,} different English sentences, no one in two parts")
        lines.append(f"  vocabularies: {m['source_vocabulary']:,} and {m['target_vocabulary']:,} pieces")
        if m["too_long"]:
            length = m["settings"]["length"]
            lines.append(f"  {m['too_long']:,} training pairs are longer than {length} tokens and will not be used")
        return "\n".join(lines)


def prepare(config: PrepareConfig, say: Callable[[str], None] = print) -> Prepared:
    """Downloads, cleans, splits, learns vocabularies, and writes it all down.

    Args:
        config: what to prepare.
        say: takes a line for each thing that is begun.

    Raises:
        CorpusError: there is no text, a file of the user's cannot be read, or something else is in the folder.
        VocabularyError: the text does not support vocabularies of the size that was asked for.
    """
    known = read_manifest(config.output)
    if known is None and config.output.exists() and (not config.output.is_dir() or any(config.output.iterdir())):
        raise CorpusError(
            "there is something here that is not a prepared corpus.",
            str(config.output),
            way_out="Name another folder with --output, or empty this one.",
        )
    for file in config.files:
        parallel.read(file)  # what cannot be read is said before anything is downloaded
    same = known if known is not None and known.get("fingerprint") == config.fingerprint else None
    if same and not any(source["problem"] for source in same["sources"]):
        return Prepared({**same, "folder": str(config.output)}, was_there=True)
    fetched = list(_fetch(config, say))
    if same and all(bool(new.problem) == bool(old["problem"]) for new, old in zip(fetched, same["sources"])):
        return Prepared({**same, "folder": str(config.output)}, was_there=True)
    _refuse_to_lose(config.output, known, fetched)
    work = config.output.with_name(config.output.name + ".unfinished")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        manifest = _build(config, fetched, work, say)
        _replace(config.output, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Prepared({**manifest, "folder": str(config.output)}, was_there=False)


def _build(config: PrepareConfig, fetched: Sequence[Fetched], work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes all files into ``work``."""
    left_out, rejected = Counter[str](), Counter[str]()
    pairs: dict[Pair, None] = {}
    with (work / "rejected.tsv").open("w", encoding="utf-8") as aside:
        sources = list(_from_sources(fetched, pairs, left_out, aside, say))
        files = list(_from_files(config, pairs, left_out, rejected, aside))
    if not pairs:
        raise CorpusError(
            "there is not one pair of sentences to train on.",
            got="; ".join([*(s["problem"] for s in sources if s["problem"]), *_counts(left_out)]) or None,
            way_out="Check the connection to the package index, or give text of your own with --files.",
        )
    manifest = {
        "fingerprint": config.fingerprint, "format": FORMAT, "sources": sources, "files": files,
        "left_out": dict(left_out.most_common()), "rejected": dict(rejected.most_common()),
        "settings": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        **_write_parts(list(pairs), config, work, say),
    }  # fmt: skip
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def _refuse_to_lose(output: Path, known: dict[str, Any] | None, fetched: Sequence[Fetched]) -> None:
    had = {source["name"] for source in known["sources"] if not source["problem"]} if known else set()
    lost = [got for got in fetched if got.problem and got.source.name in had]
    if lost:
        raise CorpusError(
            f"{lost[0].source.name} {lost[0].source.version} is not to be had, and the corpus here has it.",
            str(output),
            lost[0].problem,
            "Try again with a connection to the package index, or prepare into another folder with --output.",
        )


def _replace(output: Path, work: Path) -> None:
    """Puts the finished folder in its place; the former one goes only then."""
    former = output.with_name(output.name + ".former")
    shutil.rmtree(former, ignore_errors=True)
    if output.exists():
        output.rename(former)
    work.rename(output)
    shutil.rmtree(former, ignore_errors=True)


def open_text(folder: Path) -> PreparedText:
    """The corpus that was prepared in a folder.

    Raises:
        CorpusError: there is none.
    """
    return PreparedText.load(folder)


def _fetch(config: PrepareConfig, say: Callable[[str], None]) -> Iterator[Fetched]:
    config.cache.mkdir(parents=True, exist_ok=True)
    for source in chosen(config.sources):
        got = fetch(source, config.cache)
        if not got.was_there:
            told = f"not to be had, going on without it ({got.problem})" if got.problem else "downloaded"
            say(f"{source.name} {source.version}: {told}")
        yield got


def _from_sources(
    fetched: Sequence[Fetched], pairs: dict[Pair, None], left_out: Counter[str], aside: TextIO,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    for got in fetched:
        source = got.source
        found: dict[str, Any] = {
            "name": source.name, "version": source.version, "licence": source.licence, "sha256": got.sha256,
            "archive": got.archive.name if got.archive else None, "problem": got.problem, "pairs": 0, "languages": 0,
            "unreadable": 0,
        }  # fmt: skip
        if got.archive is not None:
            say(f"reading {source.name}")
            before = len(pairs)
            good: list[Pair] = []
            for item in source.read(got.archive):
                if isinstance(item, Unreadable):
                    found["unreadable"] += 1
                    aside.write(f"{got.archive.name}:{item.name}\t{item.problem}\n")
                else:
                    good.append(item)
            languages = _keep(good, pairs, left_out)
            found |= {"pairs": len(pairs) - before, "languages": len(languages)}
        yield found


def _from_files(
    config: PrepareConfig, pairs: dict[Pair, None], left_out: Counter[str], rejected: Counter[str], aside: TextIO
) -> Iterator[dict[str, Any]]:
    for path in config.files:
        before, good, bad = len(pairs), [], 0
        for item in parallel.read(path):
            if isinstance(item, parallel.BadLine):
                bad += 1
                rejected[item.reason] += 1
                aside.write(f"{path}:{item.number}\t{item.reason}\t{item.text}\n")
            else:
                good.append(item)
        _keep(good, pairs, left_out)
        yield {"path": str(path), "pairs": len(pairs) - before, "rejected": bad}


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


def _counts(left_out: Counter[str]) -> list[str]:
    return [f"{n:,} {reason}" for reason, n in left_out.most_common()]


def _write_parts(pairs: list[Pair], config: PrepareConfig, work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    key_of = {english: hold_out.key(english) for english in dict.fromkeys(p.english for p in pairs)}
    by_language: dict[str, set[str]] = {}
    for pair in pairs:
        by_language.setdefault(pair.language, set()).add(key_of[pair.english])
    part_of = hold_out.parts(key_of.values(), config.dev, config.test, by_language)
    parts: dict[str, list[Pair]] = {hold_out.TRAIN: [], hold_out.DEV: [], hold_out.TEST: []}
    for pair in pairs:
        parts[part_of[key_of[pair.english]]].append(pair)
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
    say(f"learning vocabularies from {len(train):,} pairs")
    source = learn(_sample(train, config.temperature, rng), config.source_vocabulary, 8000, "source")
    target = learn(dict.fromkeys(p.english for p in train), config.target_vocabulary, 4000, "target")
    (work / "source.model").write_bytes(source.model)
    (work / "target.model").write_bytes(target.model)
    languages = Counter(p.language for p in pairs)
    encoded = {
        name: _encode(parts[name], source, target, work / f"{name}.npz") for name in (hold_out.TRAIN, hold_out.DEV)
    }
    too_long = {name: int((data.lengths > config.length).sum()) for name, data in encoded.items()}
    for name, count in too_long.items():
        if count == len(parts[name]):
            raise CorpusError(
                f"no pair of the {name} part fits into {config.length} tokens.",
                got=f"{count:,} pairs",
                way_out="Allow longer ones with --length, or give shorter sentences.",
            )
    return {
        "pairs": {name: len(members) for name, members in parts.items()},
        "languages": dict(languages.most_common()),
        "english": len(part_of),
        "source_vocabulary": source.size,
        "target_vocabulary": target.size,
        "too_long": too_long[hold_out.TRAIN],
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


def _encode(pairs: Sequence[Pair], source: Vocabulary, target: Vocabulary, path: Path) -> Encoded:
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
    return encoded
