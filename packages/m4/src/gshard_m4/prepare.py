"""Prepare: from packages and files to a folder that training reads.

    manifest.json                   what was asked for and what came of it: sources, licences, hashes, counts
    train.tsv  dev.tsv  test.tsv    language, foreign sentence, English sentence
    rejected.tsv                    lines of the user's own files that are no pairs, and files of packages that
                                    cannot be read, each with the reason
    left-out/                       pairs that are not worth training on, each with the reason
    distribution.csv  .svg          languages by size
    source.model  target.model      vocabularies
    train/  dev/                    the pairs as ids, see `gshard_m4.encoded`

The folder appears at once, complete, or not at all: what was there before stays until then, and a corpus is never
replaced by one that lacks a package it had. Preparing the same again does nothing, except that packages that were not
to be had are asked for again. What is stopped goes on where it was: archives and what was read from them are in the
cache, and each later stage is done once.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gshard import GShardError
from gshard_m4.corpus import hold_out, parallel, report
from gshard_m4.corpus.cache import once
from gshard_m4.corpus.extract import Extracted, extract_all
from gshard_m4.corpus.fetch import Fetched, Fetcher
from gshard_m4.corpus.known_english import KNOWN_DEV
from gshard_m4.corpus.merge import merge
from gshard_m4.corpus.own_files import OwnFiles
from gshard_m4.corpus.part import PARTS, Split, write_parts
from gshard_m4.encode import encode, learn_source, learn_target
from gshard_m4.encoded import Encoded
from gshard_m4.errors import CorpusError
from gshard_m4.language_names import name_of
from gshard_m4.prepare_config import FORMAT, TIERS, PrepareConfig
from gshard_m4.prepared import Prepared
from gshard_m4.text import MANIFEST, PreparedText, read_manifest
from gshard_m4.tokens import Vocabulary

__all__ = ["PrepareConfig", "Prepared", "prepare"]

_OWN = "your own files"
_ENCODED = (hold_out.TRAIN, hold_out.DEV, KNOWN_DEV)
_FITS, _LONGEST = 0.99, 128  # of one's own text: the share of pairs a row should hold, and the longest row for that


def prepare(config: PrepareConfig, say: Callable[[str], None] = print) -> Prepared:
    """Downloads, cleans, splits, learns vocabularies, and writes it all down.

    Args:
        config: what to prepare.
        say: takes a line for each thing that is begun or done.

    Raises:
        CorpusError: there is no text, a file of the user's cannot be read, or something else is in the folder.
        VocabularyError: the text does not support vocabularies of the size that was asked for.
    """
    output = config.folder
    known = read_manifest(output)
    if known is None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CorpusError(
            "there is something here that is not a prepared corpus.",
            str(output),
            hint="Name another folder with --output, or empty this one.",
        )
    for file in (*config.files, *config.dev_files, *config.test_files):
        parallel.read(file)  # what cannot be read is said before anything is downloaded
    there = Prepared({**(known or {}), "folder": str(output)}, was_there=True)
    if known and known.get("format") != FORMAT and _has_settings(known, config):
        return there  # its runs need its vocabularies
    same = known if known and known["fingerprint"] == config.fingerprint else None
    if same and not any(source["problem"] for source in same["sources"]):
        return there
    fetched = list(_fetch(config, say))
    if same and all(bool(new.problem) == bool(old["problem"]) for new, old in zip(fetched, same["sources"])):
        return there
    _refuse_to_lose(output, known, fetched)
    work = output.with_name(output.name + ".unfinished")
    try:
        manifest = _build(config, fetched, work, say)
    except GShardError:
        shutil.rmtree(work, ignore_errors=True)  # doing the same again would not help
        raise
    _replace(output, work)
    return Prepared({**manifest, "folder": str(output)}, was_there=False)


def _has_settings(known: Mapping[str, Any], config: PrepareConfig) -> bool:
    """Whether a corpus of another version was prepared with these settings, as far as it had them."""
    asked = {**config.settings, "files": [str(file) for file in config.files]}
    if config.length is None:
        del asked["length"]  # the manifest has what was taken
    return all(known["settings"].get(name, value) == value for name, value in json.loads(json.dumps(asked)).items())


def _build(config: PrepareConfig, fetched: Sequence[Fetched], work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Makes all files in a folder, in stages that are done once each."""
    fingerprint = config.fingerprint
    made_from = [fingerprint, *(sorted(got.sha256.items()) for got in fetched)]

    def stage(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return once(work / f"{name}.done.json", made_from, make)

    text = stage("text", lambda: _write_text(config, fetched, work, say))
    settings = config.settings
    kept = None if config.vocabularies is None else PreparedText.load(config.vocabularies)

    def vocabulary(side: str) -> dict[str, Any]:
        if kept:
            found: Vocabulary = getattr(kept, side)
        elif side == "source":
            counts = {row["language"]: row[hold_out.TRAIN] for row in text["distribution"]}
            say(f"learning vocabularies from {sum(counts.values()):,} pairs")
            found = learn_source(work / "train.tsv", counts, config)
        else:
            found = learn_target(work / "train.tsv", config)
        (work / f"{side}.model").write_bytes(found.model)
        return {"size": found.size, "sha256": found.sha256}

    vocabularies = {side: stage(side, functools.partial(vocabulary, side)) for side in ("source", "target")}
    for part in _ENCODED:
        stage(part, functools.partial(_encode, work, part, text["pairs"][part], say))
    lengths = {part: Encoded.load(work / part).lengths for part in _ENCODED}
    length = settings["length"]
    if config.length is None and kept:
        length = kept.length  # what a run with them reads
    elif config.length is None and config.files:
        length = fitting(lengths[hold_out.TRAIN], length, min(_LONGEST, settings["tokens"]))
    for part in (hold_out.TRAIN, hold_out.DEV):
        _check_length(part, lengths[part], length)
    settings = {**settings, "length": length, "sources": config.sources}
    manifest = {
        "fingerprint": fingerprint, "format": FORMAT,
        "settings": {**settings, "files": [str(file) for file in config.files]},
        **text, **{f"{side}_vocabulary": made["size"] for side, made in vocabularies.items()},
        "too_long": int((lengths[hold_out.TRAIN] > length).sum()),
        "length_of_nearly_all": fitting(lengths[hold_out.TRAIN], length, 10**6),
        "models": {side: made["sha256"] for side, made in vocabularies.items()},
    }  # fmt: skip
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in work.glob("*.done.json"):  # only resuming needs them
        path.unlink()
    return manifest


def _write_text(
    config: PrepareConfig, fetched: Sequence[Fetched], work: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Extracts, merges and splits; what the manifest says about the text."""
    shutil.rmtree(work, ignore_errors=True)
    left_out_folder = work / "left-out"
    for folder in (left_out_folder, work / "merging"):
        folder.mkdir(parents=True)
    settings = config.settings
    by_name = extract_all(fetched, config.cache / "extracted", config.jobs, say)
    own = OwnFiles(work / "rejected.tsv")
    tally = own.extract(config.files, work / "own.pairs.tsv", left_out_folder / "files.tsv.gz")
    left_out = tally.left_out
    for found in by_name.values():
        shutil.copyfile(found.left_out, left_out_folder / f"{found.name}.tsv.gz")
        left_out.update(found.counts["left_out"])
    read = sum(found.counts["pairs"] for found in by_name.values())
    say(f"merging {read + tally.languages.total():,} pairs")
    merged = merge(
        {_OWN: work / "own.pairs.tsv", **{name: found.pairs for name, found in by_name.items()}},
        work / "merging",
        left_out_folder / "merging.tsv.gz",
        least=TIERS[config.tier].least,
        most=0 if config.only else settings["languages"],
        always=sorted({*tally.languages, *config.only}),
    )
    if absent := [name for name in config.only if not merged.languages[name]]:
        there = ", ".join(name for name, _ in merged.languages.most_common())
        raise CorpusError(
            f"there is no text in {name_of(absent[0])} here.", got=f"--only {' '.join(config.only)}",
            hint=f"There are: {there}.",
        )  # fmt: skip
    left_out.update(merged.left_out)
    if not merged.files:
        problems = [got.problem for got in fetched if got.problem]
        refused = [f"{n:,} lines with {reason}" for reason, n in own.rejected.most_common(8)]
        aside = [f"{n:,} pairs {reason}" for reason, n in left_out.most_common(8)]
        raise CorpusError(
            "there is not one pair of sentences to train on.",
            where=own.first_bad,
            got="; ".join([*problems, *refused, *aside]) or None,
            hint="Check the connection to the package index, or give text of your own with --files."
            if problems or not config.files
            else "Files are .tsv (language, foreign, English), .jsonl, .po, or talk.de beside talk.en.",
        )
    tags = None if config.vocabularies is None else PreparedText.load(config.vocabularies).tag_names
    if tags is not None and (unknown := sorted(set(merged.files) - set(tags))):
        raise CorpusError(
            f"the vocabularies have no tag for {name_of(unknown[0])}.",
            where=str(config.vocabularies),
            got=f"text in {', '.join(unknown)}",
            hint=f"Leave these languages out: there are {', '.join(tags)}.",
        )
    split = Split(config.dev, config.test, settings["quota"], settings["known"])
    say(f"splitting {sum(merged.languages[name] for name in merged.files):,} pairs by English sentence")
    given = {
        part: own.held_out(files, merged.files, work / f"own.{part}.tsv")
        for part, files in ((hold_out.DEV, config.dev_files), (hold_out.TEST, config.test_files))
        if files
    }
    parts = write_parts(merged.files, work, split, left_out_folder / "given.tsv.gz", given)
    left_out.update(parts.pop("kept_out"))
    with (work / "rejected.tsv").open("a", encoding="utf-8", newline="\n") as out:
        for found in by_name.values():
            out.writelines(f"{found.name}:{name}\t{problem}\n" for name, problem in found.counts["unreadable"])
    for path in (work / "own.pairs.tsv", *given.values()):
        path.unlink()
    shutil.rmtree(work / "merging")
    report.write_table(parts["distribution"], work / "distribution.csv")
    if not report.write_plot(parts["distribution"], work / "distribution.svg"):
        say("no plot of the languages: matplotlib is not installed")
    sizes = list(merged.languages.values())
    return {
        "sources": [_about(got, by_name.get(got.source.name), merged.sources) for got in fetched],
        "files": own.files,
        "left_out": dict(left_out.most_common()),
        "rejected": dict(own.rejected.most_common()),
        "languages": {row["language"]: sum(row[part] for part in PARTS) for row in parts["distribution"]},
        "found": {
            "pairs": sum(sizes),
            "languages": len(sizes),
            "with 1,000 pairs": sum(n >= 1000 for n in sizes),
            "with 10,000 pairs": sum(n >= 10_000 for n in sizes),
        },
        **({} if tags is None else {"tags": tags}),
        **parts,
    }


def _about(got: Fetched, found: Extracted | None, left: Mapping[str, int]) -> dict[str, Any]:
    """What the manifest says about a source."""
    counts: Mapping[str, Any] = found.counts if found else {"read": 0, "pairs": 0, "languages": {}, "unreadable": []}
    source = got.source
    return {
        "name": source.name, "version": source.version, "licence": source.licence, "registry": source.registry,
        "sha256": dict(got.sha256), "problem": got.problem, "read": counts["read"], "clean": counts["pairs"],
        "pairs": left.get(source.name, 0), "languages": len(counts["languages"]),
        "unreadable": len(counts["unreadable"]),
    }  # fmt: skip


def _encode(work: Path, part: str, pairs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes the ids of a part."""
    shutil.rmtree(work / part, ignore_errors=True)
    source, target = (Vocabulary.load(work / f"{side}.model") for side in ("source", "target"))

    def progress(done: int) -> None:
        if pairs > 1_000_000 and done % 1_000_000 == 0:
            say(f"encoded {done:,} of {pairs:,} pairs")

    encode(work / f"{part}.tsv", work / part, source, target, progress)
    return {}


def fitting(lengths: np.ndarray, least: int, most: int) -> int:
    """The tokens of a row that holds 99 % of the pairs, a multiple of 8, but at least and at most so many.

    >>> fitting(np.arange(1, 101), 24, 128), fitting(np.arange(1, 11), 24, 128)
    (104, 24)
    """
    needed = int(np.quantile(lengths, _FITS, method="higher")) if len(lengths) else least
    return max(least, min(-(-needed // 8) * 8, most))


def _check_length(part: str, lengths: np.ndarray, length: int) -> None:
    if not (lengths <= length).any():
        raise CorpusError(
            f"no pair of the {part} part fits into {length} tokens.",
            got=f"{len(lengths):,} pairs",
            hint="Allow longer ones with --length, or give shorter sentences.",
        )


def _refuse_to_lose(output: Path, known: dict[str, Any] | None, fetched: Sequence[Fetched]) -> None:
    had = {source["name"] for source in known["sources"] if not source["problem"]} if known else set()
    lost = [got for got in fetched if got.problem and got.source.name in had]
    if lost:
        raise CorpusError(
            f"{lost[0].source.title} is not to be had, and the corpus here has it.",
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


def _fetch(config: PrepareConfig, say: Callable[[str], None]) -> Iterator[Fetched]:
    fetcher = Fetcher(config.cache)
    sources = config.chosen_sources
    for number, source in enumerate(sources, 1):
        got = fetcher.fetch(source)
        if not got.was_there:
            mb = f"downloaded, {got.size / 1e6:.1f} MB"
            told = f"not to be had, going on without it ({got.problem})" if got.problem else mb
            say(f"[{number}/{len(sources)}] {source.title}: {told}")
        yield got
