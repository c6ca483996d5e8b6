"""``gshard-m4 evaluate``: how well a run translates, on both tests of its corpus, beside baselines."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from gshard_m4 import by_class, evaluation_files, runs, score
from gshard_m4.config import Run, on_devices
from gshard_m4.corpus.pair import Pair
from gshard_m4.decode import DecodeConfig
from gshard_m4.devices import check_devices, tell_uneven_experts
from gshard_m4.errors import CommandError
from gshard_m4.evaluation_files import BOTH, KNOWN_ENGLISH, NEW_ENGLISH, HeldOut, Line
from gshard_m4.step import compile_step, held_out_cross_entropy, make_evaluation
from gshard_m4.text import PreparedText
from gshard_m4.translate import Translator, load

_TESTS: dict[str, Sequence[HeldOut]] = {"both": BOTH, "known": (KNOWN_ENGLISH,), "new": (NEW_ENGLISH,)}
_NO_KNOWN = (
    "This corpus has no test of known English: an earlier version prepared it, --known 0 was given, or too few of its "
    "sentences are in three languages. gshard-m4 prepare --output FOLDER makes another corpus."
)

Baseline = Translator | Mapping[str, Sequence[Line]]
"""A model, or what one wrote for each test."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measures a model on held-out sentences: cross entropy, BLEU and chrF++ for each language, beside baselines.

    Attributes:
        data: folder of the corpus the model was trained on; what the run remembers if not given.
        run: folder of the run; the newest one if not given.
        step: which checkpoint; the newest if not given.
        test: ``known`` scores pairs that are new although other languages have their English in training, ``new``
            sentences whose English is in no training pair, ``both`` the one after the other.
        sentences: held-out sentences of each test to translate, as many of each language as there are; all if not
            given. Of one that is longer than the model reads the beginning is translated, and all of it scored.
        each: sentences of each language at most.
        languages: score these languages only; all that the model was trained on if not given.
        output: where to write results.json, scores.csv, classes.csv, translations.tsv and languages.svg, and in a
            folder known-english the same of that test; if not given, the folder "evaluation" of the run.
        baselines: what to form differences to: folders of evaluations, whose translations are scored again, or runs of
            the same corpus, which are then translated with, too; RUN@STEP is one checkpoint. Several that share no
            language count as one.
        batch: sentences that are translated together.
        devices: devices to partition the search over.
        search: how to search.
    """

    data: Path | None = None
    run: Path | None = None
    step: int | None = None
    test: Literal["both", "known", "new"] = "both"
    sentences: int | None = None
    each: int | None = None
    languages: tuple[str, ...] = ()
    output: Path | None = None
    baselines: tuple[str, ...] = ()
    batch: int = 32
    devices: int = 1
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)

    def __call__(self) -> int:
        """Evaluates; what is wrong with the baselines is an error before anything is translated."""
        for count in (self.sentences, self.each):
            if count is not None and count < 1:
                raise CommandError(f"cannot score {count} sentences.", hint="Ask for at least one.")
        check_devices(self.devices)
        run = runs.chosen(self.run)
        corpus = runs.corpus_of(run, self.data)
        print(f"reading the model of {run.directory} and the corpus in {corpus} ...", flush=True)
        translator = self._load(corpus, run, self.step)
        tell_uneven_experts(translator.model.experts, self.devices)
        text = translator.text.of_languages(self.languages) if self.languages else translator.text
        tests = [held for held in _TESTS[self.test] if text.has(held.test)]
        if KNOWN_ENGLISH in _TESTS[self.test] and KNOWN_ENGLISH not in tests:
            print(_NO_KNOWN)
        if not tests:
            raise CommandError("there is nothing to score.", where=str(corpus), hint="Ask with --test new.")
        others = {name: self._baseline(corpus, name, tests) for name in self.baselines}
        held_out = compile_step(make_evaluation(on_devices(translator.model, 1)), 1, donate=False)
        folder = self.output or run.directory / "evaluation"
        for held in tests:
            print(f"== {held.name}: {held.about} ==")
            value = None
            if batches := text.held_out(held.dev):
                value = held_out_cross_entropy(held_out, translator.params, batches)
                print(f"held-out cross entropy: {value:.3f} nats a token, of dev pairs of at most {text.length} tokens")
            about = {"name": run.directory.name, "step": self.step, "cross_entropy": value}
            self._one(held, about, text, translator, others, folder / held.folder)
        print(f"written: {folder}")
        return 0

    def _one(
        self,
        held: HeldOut,
        about: dict[str, Any],
        text: PreparedText,
        translator: Translator,
        others: Mapping[str, Baseline],
        folder: Path,
    ) -> None:
        """Scores one test, tells and writes it."""
        examples = text.examples(self.sentences, held.test, self.each)
        if not examples:
            print(f"these languages have no sentences with {held.name}\n")
            return
        languages, sources, references = (list(column) for column in zip(*examples, strict=True))
        print(f"translating {len(examples):,} sentences of {len(set(languages))} languages ...", flush=True)
        translated = translator.translate(sources)
        written, cut = [of.text for of in translated], [of.cut for of in translated]
        counts_NK = score.counted(written, references)
        scored = by_class.Scored(examples, counts_NK, translator.languages)
        # A score of short texts that resemble each other says little, unless these translators are beside it.
        copies_NK = score.counted(sources, references)
        frequent_NK = score.counted([text.frequent_sentence()] * len(references), references)
        beside = {"copy the source": copies_NK, "the most frequent sentence": frequent_NK}
        lines = scored.lines()
        print(f"\n{score.table({'model': counts_NK} | beside, lines)}")
        if len(set(lines)) < len(set(languages)):
            print(f"languages with fewer than {by_class.ALONE} sentences are scored together, by class")
        longer = f"are longer than the {text.length - 1} tokens that the model reads"
        print("\n" + score.told_apart(f"{longer}, and were translated without their end", cut, counts_NK))
        twins = text.near_twins(references) if held is NEW_ENGLISH else None
        if twins is not None:
            print(score.told_apart("have a near twin in training (80 % of the letters)", twins, counts_NK))
        near = [score.is_near_copy(*pair) for pair in zip(sources, references, strict=True)]
        half = "are near copies, with half of their English words in the source"
        print(score.told_apart(half, near, counts_NK, copies_NK))
        if self.search.placeholders and (marked := [of for of in translated if of.placeholders]):
            whole = sum(not (of.lost or of.invented) for of in marked)
            print(f"placeholders: the model wrote those of {whole:,} of {len(marked):,} sentences that have any")

        theirs = evaluation_files.joined(examples, self._theirs(held, others, examples))
        scored = dataclasses.replace(scored, theirs=theirs)
        rows, classes = scored.by_language(), scored.by_class()
        names = " and ".join(map(_name, self.baselines))
        print(f"\n{by_class.summary(classes, names)}\n{score.SIGNATURE}\n")
        about = about | {
            "signature": score.SIGNATURE,
            "beside": {name: score.points(counts.sum(0)).tolist() for name, counts in beside.items()},
            "cut": sum(cut),
            "near_twins": None if twins is None else sum(twins),
        }
        evaluation_files.save(folder, about, scored, written, rows, classes)
        try:
            figure = importlib.import_module("gshard_m4.figure")
        except ModuleNotFoundError as error:
            print(
                f"gshard-m4: no figure was drawn: {error}; install matplotlib (the extra gshard-m4[plot])",
                file=sys.stderr,
            )
        else:
            figure.figure(folder / "languages.svg", about["name"], rows, scored.classes, names)

    def _theirs(
        self, held: HeldOut, others: Mapping[str, Baseline], examples: Sequence[Pair]
    ) -> dict[str, Sequence[Line]]:
        """What the baselines write, or wrote, for a test."""
        found: dict[str, Sequence[Line]] = {}
        for name, other in others.items():
            if isinstance(other, Translator):
                shared = [example for example in examples if example.language in other.languages]
                translated = other.translate([example.foreign for example in shared])
                found[name] = evaluation_files.lines_of(shared, [of.text for of in translated])
            elif held.name in other:
                found[name] = other[held.name]
            else:
                print(f"{name} was not scored on {held.name}: no differences; evaluate it again for them")
        return found

    def _load(self, corpus: Path, run: Run, step: int | None) -> Translator:
        return load(run, PreparedText.load(corpus), self.search, step, batch=self.batch, devices=self.devices)

    def _baseline(self, corpus: Path, name: str, tests: Sequence[HeldOut]) -> Baseline:
        folder, _, step = name.partition("@")
        if step:
            if not step.isdecimal():
                raise CommandError(f"{step!r} is no step of a run.", where=name, hint="Write RUN@STEP.")
            return self._load(corpus, runs.chosen(Path(folder)), int(step))
        path = Path(name)
        if path.is_file():
            return {NEW_ENGLISH.name: evaluation_files.read_lines(path.parent)}
        place = path / "evaluation" if (path / "evaluation").is_dir() else path
        there = [held for held in tests if (place / held.folder / evaluation_files.RESULTS).is_file()]
        if there:
            return {held.name: evaluation_files.read_lines(place / held.folder) for held in there}
        return self._load(corpus, runs.chosen(path), None)


def _name(baseline: str) -> str:
    """What a baseline is called: ``runs/dense/evaluation`` is ``dense``."""
    path = Path(baseline)
    return path.parent.name if path.name == "evaluation" else path.name
