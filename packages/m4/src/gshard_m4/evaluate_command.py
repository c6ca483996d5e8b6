"""``gshard-m4 evaluate``: how well a run translates, on both tests of its corpus, beside baselines."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from gshard_m4 import by_class, evaluate, evaluation_files, near_copies, runs, score
from gshard_m4.config import Run, on_devices
from gshard_m4.corpus.pair import Pair
from gshard_m4.decode import DecodeConfig
from gshard_m4.devices import check_devices, tell_uneven_experts
from gshard_m4.errors import CommandError
from gshard_m4.held_out import BOTH, KNOWN_ENGLISH, NEW_ENGLISH, NO_KNOWN, HeldOut
from gshard_m4.prepare import open_text
from gshard_m4.step import compile_step, held_out_cross_entropy, make_evaluation
from gshard_m4.text import DATA, PreparedText
from gshard_m4.translate import Translator, load

_TESTS: dict[str, Sequence[HeldOut]] = {"both": BOTH, "known": (KNOWN_ENGLISH,), "new": (NEW_ENGLISH,)}


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
        baselines: what to form differences to: folders with results.json, or runs of the same corpus, which are then
            translated with, too; RUN@STEP is one checkpoint. Several that share no language count as one.
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
        """Evaluates; what can be wrong with the baselines is told before anything is translated."""
        for count in (self.sentences, self.each):
            if count is not None and count < 1:
                raise CommandError(f"cannot score {count} sentences.", hint="Ask for at least one.")
        check_devices(self.devices)
        run = runs.chosen(self.run)
        corpus = runs.corpus_of(run, self.data, DATA)
        print(f"reading the model of {run.directory} and the corpus in {corpus} ...", flush=True)
        translator = self._load(open_text(corpus), run, self.step)
        tell_uneven_experts(translator.model.experts, self.devices)
        text = translator.text.of_languages(self.languages) if self.languages else translator.text
        tests = [held for held in _TESTS[self.test] if text.has(held.test)]
        if KNOWN_ENGLISH in _TESTS[self.test] and KNOWN_ENGLISH not in tests:
            print(NO_KNOWN)
        if not tests:
            raise CommandError("there is nothing to score.", where=str(corpus), hint="Ask with --test new.")
        others = {name: self._baseline(open_text(corpus), name, tests) for name in self.baselines}
        model = on_devices(translator.model, 1)
        held_out = compile_step(make_evaluation(model), 1, donate=False)
        folder = self.output or run.directory / "evaluation"
        for held in tests:
            print(f"== {held.name}: {held.about} ==")
            value = None
            if batches := text.held_out(held.dev):
                value = held_out_cross_entropy(held_out, translator.params, batches)
                print(f"held-out cross entropy: {value:.3f} nats a token, of dev pairs of at most {text.length} tokens")
            self._one(held, run, text, translator, others, folder / held.folder, value)
        print(f"written: {folder}")
        return 0

    def _one(
        self,
        held: HeldOut,
        run: Run,
        text: PreparedText,
        translator: Translator,
        others: dict[str, dict[str, evaluate.Results] | Translator],
        folder: Path,
        cross_entropy: float | None,
    ) -> None:
        """Scores one test, tells and writes it."""
        examples = text.examples(self.sentences, held.test, self.each)
        if not examples:
            print(f"these languages have no sentences with {held.name}\n")
            return
        sources, references, languages = ([e[i] for e in examples] for i in (1, 2, 0))
        print(f"translating {len(examples):,} sentences of {len(set(languages))} languages ...", flush=True)
        translated = translator.translate(sources)
        written, cut = [of.text for of in translated], [of.cut for of in translated]
        pairs = translator.languages
        results = evaluate.measure(run.directory.name, examples, written, pairs, self.step)
        lines = by_class.lines_of(results)
        labels = [lines[code] for code in languages]
        systems = {"model": score.score(written, references, labels)}
        systems |= score.baselines(sources, references, labels, text.frequent_sentence())
        beside = {name: (of[score.ALL].bleu, of[score.ALL].chrf) for name, of in systems.items() if name != "model"}
        twins = text.near_twins(references) if held is NEW_ENGLISH else None
        results = dataclasses.replace(
            results, cross_entropy=cross_entropy, beside=beside, cut=sum(cut),
            near_twins=None if twins is None else sum(twins),
        )  # fmt: skip
        print(f"\n{score.table(systems)}")
        if len(set(lines.values())) < len(lines):
            print(f"languages with fewer than {by_class.ALONE} sentences are scored together, by class")
        print(f"\n{near_copies.told_longer(text.length - 1, cut, references, written)}")
        if twins is not None:
            print(near_copies.told_twins(twins, references, written))
        print(near_copies.told(sources, references, written))
        if self.search.placeholders and (marked := [of for of in translated if of.placeholders]):
            whole = sum(not (of.lost or of.invented) for of in marked)
            print(f"placeholders: the model wrote those of {whole:,} of {len(marked):,} sentences that have any")

        compared, theirs = self._compared(held, others, examples, pairs)
        deltas = evaluate.differences(results, compared)
        rows = by_class.by_language(results, examples, written, theirs, deltas)
        classes = by_class.by_class(results, examples, written, theirs)
        names = " and ".join(map(_name, self.baselines))
        print(f"\n{by_class.summary(classes, names)}\n{results.signature}\n")
        evaluation_files.save(folder, results, examples, written, rows, classes)
        try:
            figure = importlib.import_module("gshard_m4.figure")
        except ModuleNotFoundError as error:
            print(
                f"gshard-m4: no figure was drawn: {error}; install matplotlib (the extra gshard-m4[plot])",
                file=sys.stderr,
            )
        else:
            figure.figure(folder / "languages.svg", results, deltas, names)

    def _compared(
        self,
        held: HeldOut,
        others: dict[str, dict[str, evaluate.Results] | Translator],
        examples: Sequence[Pair],
        pairs: Any,
    ) -> tuple[list[evaluate.Results], dict[str, list[str]]]:
        """The baselines' results on a test, and what they wrote for each language."""
        compared: list[evaluate.Results] = []
        theirs: dict[str, list[str]] = {}
        for name, other in others.items():
            if isinstance(other, Translator):
                shared = [example for example in examples if example.language in other.languages]
                by_other = [t.text for t in other.translate([example.foreign for example in shared])]
                for example, line in zip(shared, by_other, strict=True):
                    theirs.setdefault(example.language, []).append(line)
                compared.append(evaluate.measure(name, shared, by_other, pairs))
            elif held.name in other:
                theirs |= evaluation_files.read_translations(_place(name) / held.folder)
                compared.append(other[held.name])
            else:
                print(f"{name} was not scored on {held.name}: no differences; evaluate it again for them")
        return compared, theirs

    def _load(self, text: Any, run: Run, step: int | None) -> Translator:
        return load(run, text, self.search, step, batch=self.batch, devices=self.devices)

    def _baseline(self, text: Any, name: str, tests: Sequence[HeldOut]) -> dict[str, evaluate.Results] | Translator:
        folder, _, step = name.partition("@")
        if step:
            if not step.isdecimal():
                raise CommandError(f"{step!r} is no step of a run.", where=name, hint="Write RUN@STEP.")
            return self._load(text, runs.chosen(Path(folder)), int(step))
        if Path(name).is_file():
            return {NEW_ENGLISH.name: evaluate.Results.load(Path(name))}
        place = _place(name)
        there = [held for held in tests if (place / held.folder / evaluate.RESULTS).is_file()]
        if there:
            return {held.name: evaluate.Results.load(place / held.folder) for held in there}
        return self._load(text, runs.chosen(Path(name)), None)


def _name(baseline: str) -> str:
    """What a baseline is called: ``runs/dense/evaluation`` is ``dense``."""
    path = Path(baseline)
    return path.parent.name if path.name == "evaluation" else path.name


def _place(name: str) -> Path:
    """The folder of an evaluation: what was named, or that of the run that was."""
    path = Path(name)
    if path.is_file():
        return path.parent
    inner = path / "evaluation"
    return inner if inner.is_dir() else path
