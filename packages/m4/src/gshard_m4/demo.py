"""The demo: everything once, small enough for two processor cores and ten minutes.

It prepares a small corpus, shows how the training step is partitioned, trains, and says what came of it: scores on both
tests of the corpus (`gshard_m4.held_out`) next to those of translators that know nothing, and translations drawn at
random.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard import moe
from gshard_m4 import near_copies, score
from gshard_m4.config import Run, TrainConfig
from gshard_m4.decode import PAD, DecodeConfig
from gshard_m4.held_out import BOTH, KNOWN_ENGLISH, NEW_ENGLISH, HeldOut
from gshard_m4.language_names import name_of
from gshard_m4.planned import describe_model, plan_summary
from gshard_m4.step import compile_step, initial_state, make_step
from gshard_m4.train import Result, train
from gshard_m4.translate import Example, Text, Translator

Say = Callable[[str], None]
MODEL, COPY = "model", "copy the source"
LEAST = 50
"""Steps that are trained however long they take."""

_SHOWN = 10
_TIMED = 8  # steps
_SEED = 0  # of the sentences that are shown


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """What came of one test.

    Attributes:
        examples: its sentences.
        written: the model's translations.
        scores: system -> score of all sentences; the model and the baselines.
        kinds: lines that tell the scores of sentences that are too long, have a near twin in training, or are copies.
    """

    examples: Sequence[Example]
    written: Sequence[str]
    scores: Mapping[str, score.Score]
    kinds: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What the demo found.

    Attributes:
        before: cross entropy before training, nats a token of held-out sentences with new English.
        after: the same after training.
        frequencies: the same for a model of word frequencies.
        tests: name of a test -> what came of it.
        seconds: of everything.
    """

    before: float
    after: float
    frequencies: float
    tests: Mapping[str, Scored]
    seconds: float


def demo(
    text: Text,
    model: moe.TransformerConfig,
    options: TrainConfig,
    run: Run,
    search: DecodeConfig,
    *,
    devices: int,
    minutes: float,
    sentences: int | None = None,
    say: Say = print,
    began: float | None = None,
) -> Report:
    """Plans, trains, evaluates and translates.

    Args:
        text: the prepared corpus.
        model: the model, planned for as many devices as it says.
        options: how long to train, and so on.
        run: where the model is saved; must not hold a checkpoint yet.
        search: how to translate.
        devices: how many to train on.
        minutes: of training: as many steps as fit, but no more than those of the options; 0 for all of these.
        sentences: held-out sentences of each test to score; all if None.
        say: takes each line of what is to be told.
        began: `time.perf_counter()` at the start of what is counted as the demo; now if None.
    """
    began = time.perf_counter() if began is None else began
    say(describe_model(model))
    if model.partitions > 1:
        say(plan_summary(model, options, text.batch(0)))
    held_out = text.held_out()
    frequencies = frequency_cross_entropy(text.target_counts(), held_out)
    if devices != model.partitions:
        say("\nno accelerators here: training takes the processor as one device, which computes the same numbers")
        model = dataclasses.replace(model, partitions=devices)
    if minutes and options.steps > LEAST:
        say("\nmeasuring how long a step takes here ...")
        options = within(options, seconds_per_step(model, options, text.batch), minutes)
    say(f"\ntraining {options.steps:,} steps")
    result = train(model, options, run, text.batch, held_out, meta={"vocabularies": text.fingerprint})
    before, *_, after = result.held_out.values()
    say(_speed(result))
    say(
        f"cross entropy of sentences with new English: {before:.2f} before, {after:.2f} after training; "
        f"word frequencies alone: {frequencies:.2f} nats a token"
    )

    params = jax.device_put(jax.device_get(result.state["params"]), jax.devices()[0])
    translator = Translator(model, params, text, search)
    tests = {}
    for held in BOTH:
        if examples := text.examples(sentences, held.test):
            say(f"translating {len(examples)} sentences with {held.name} ...")
            tests[held.name] = _scored(held, examples, translator)
    say("\n" + _columns(tests))
    for held in BOTH:
        if held.name in tests:
            say(_drawn(held, tests[held.name]))
    say("\n" + _limits(text, tests))
    seconds = time.perf_counter() - began
    say(f"\n{seconds / 60:.1f} minutes in all; the model is in {run.directory}")
    return Report(before, after, frequencies, tests, seconds)


def seconds_per_step(
    model: moe.TransformerConfig, options: TrainConfig, batch: Callable[[int], Mapping[str, np.ndarray]]
) -> float:
    """Median of some steps, whose results are thrown away."""
    step = compile_step(make_step(model, options), model.partitions)
    state = initial_state(model, options.seed)
    seconds = []
    for number in range(_TIMED + 1):
        begin = time.perf_counter()
        state, metrics = step(state, dict(batch(number)))
        float(metrics["loss"])
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[1:]))  # the first one compiles


def within(options: TrainConfig, seconds: float, minutes: float) -> TrainConfig:
    """The options with as many steps of so many seconds as fit into some minutes, and a cool-down of the same share.

    >>> fit = within(TrainConfig(steps=2000, cooldown_steps=600), 0.3, 6.0)
    >>> fit.steps, fit.cooldown_steps
    (1200, 360)
    """
    steps = min(options.steps, max(LEAST, int(60 * minutes / seconds) // LEAST * LEAST))
    return dataclasses.replace(options, steps=steps, cooldown_steps=options.cooldown_steps * steps // options.steps)


def what_next(run: Path) -> str:
    """Lines to type after the demo, with the folder of the commands where the shell would not find them."""
    name = shlex.quote(str(run))
    folder = "" if shutil.which("gshard-m4") else f"{os.path.relpath(Path(sys.executable).parent)}/"
    lines = {
        f"gshard-m4 translate --run {name}": "type sentences, or name a file",
        f"gshard-m4 serve --run {name}": "the same as a web page",
        f"gshard-m4 evaluate --run {name}": "both tests in full",
        "gshard explain gshard_m4.planned:newest_step --mesh 8 --html step.html": "how a step is split, and why",
    }
    wide = max(map(len, lines))
    return "\n".join(["next:", *(f"  {folder}{line:<{wide}}  {why}" for line, why in lines.items())])


def frequency_cross_entropy(counts_V: np.ndarray, batches: Any) -> float:
    """Cross entropy of target tokens under the frequencies of the training data, in nats; add-one smoothed.

    >>> ids = np.array([[3, 4, 0]])
    >>> round(frequency_cross_entropy(np.array([0, 0, 0, 9, 9]), [{"target": ids}]), 3)
    0.833
    """
    probability_V = (counts_V + 1.0) / (counts_V.sum() + len(counts_V))
    ids = np.concatenate([np.asarray(batch["target"]).ravel() for batch in batches])
    return float(-np.mean(np.log(probability_V[ids[ids != PAD]])))


def _scored(held: HeldOut, examples: Sequence[Example], translator: Translator) -> Scored:
    text = translator.text
    sources, references, languages = ([e[i] for e in examples] for i in (1, 2, 0))
    translated = translator.translate(sources)
    written = [of.text for of in translated]
    systems = {MODEL: score.score(written, references, languages)}
    systems |= score.baselines(sources, references, languages, text.frequent_sentence())
    kinds = [near_copies.told_longer(text.length - 1, [of.cut for of in translated], references, written)]
    if held is NEW_ENGLISH:
        kinds.append(near_copies.told_twins(text.near_twins(references), references, written))
    kinds.append(near_copies.told(sources, references, written))
    return Scored(examples, written, {name: of[score.ALL] for name, of in systems.items()}, kinds)


def _columns(tests: Mapping[str, Scored]) -> str:
    """Systems by tests, and what the tests are."""
    heads = {name: f"{name} ({len(of.examples)} sentences)" for name, of in tests.items()}
    lines = [f"{'':<28}" + "".join(f"{head:<34}" for head in heads.values())]
    systems = list(next(iter(tests.values())).scores)
    for system in systems:
        cells = (of.scores[system] for of in tests.values())
        told = (f"BLEU {cell.bleu:>4.1f}, chrF++ {cell.chrf:>4.1f}" for cell in cells)
        lines.append(f"{system:<28}" + "".join(f"{cell:<34}" for cell in told))
    lines = [line.rstrip() for line in lines]
    lines += [f"{held.name}: {held.about}" for held in BOTH if held.name in tests]
    for name, of in tests.items():
        ours, copied = of.scores[MODEL].chrf, of.scores[COPY].chrf
        lines.append(f"{name}: the model has {ours / max(copied, 1e-9):.1f} times the chrF++ of copying the source")
        lines += of.kinds
    return "\n".join([*lines, next(iter(tests.values())).scores[MODEL].signature])


def _drawn(held: HeldOut, of: Scored) -> str:
    """Some translations, drawn at random."""
    count = min(_SHOWN, len(of.examples))
    picked = np.random.default_rng(_SEED).choice(len(of.examples), count, replace=False)
    lines = [f"\n{held.name}, {count} of {len(of.examples)} drawn at random (seed {_SEED}):"]
    for at in sorted(picked):
        language, source, english = of.examples[at]
        lines.append(f"  [{language}] {source}\n    reference: {english}\n    model:     {of.written[at]}")
    return "\n".join(lines)


def _limits(text: Text, tests: Mapping[str, Scored]) -> str:
    """What the model cannot do yet."""
    lines = [
        "what it cannot do yet:",
        f"  languages other than these {len(text.languages)}: {', '.join(map(name_of, text.languages))};",
        f"  anything longer than {text.length - 1} tokens, and text that is not of the kind that programs show;",
    ]
    if {KNOWN_ENGLISH.name, NEW_ENGLISH.name} <= tests.keys():
        known, new = (tests[held.name].scores[MODEL].chrf for held in (KNOWN_ENGLISH, NEW_ENGLISH))
        if new < known:
            lines.append(
                f"  English that it has never seen (chrF++ {new:.1f} instead of {known:.1f}): it then writes the "
                "likeliest of what\n  it has seen. More English and longer training help, see docs/training.md."
            )
    if behind := [name for name, of in tests.items() if of.scores[MODEL].chrf < of.scores[COPY].chrf]:
        lines.append(f"  better than copying the source ({', '.join(behind)}): it took too few steps, see --minutes.")
    return "\n".join(lines)


def _speed(result: Result) -> str:
    return (
        f"trained: {result.tokens_per_second:,.0f} target tokens/s, {result.seconds_per_step:.2f} s a step, "
        f"{result.compile_seconds:.0f} s to compile"
    )
