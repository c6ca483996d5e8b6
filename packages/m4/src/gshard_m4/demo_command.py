"""``gshard-m4 demo``: everything once, small enough for two processor cores and ten minutes.

It prepares a small corpus, shows how the training step is partitioned, trains, evaluates on both tests of the corpus
(`gshard_m4.evaluation_files`), and shows translations drawn at random.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import tyro

from gshard import moe
from gshard_m4 import runs
from gshard_m4.config import ModelChoice, Run, TrainConfig, on_devices
from gshard_m4.decode import DecodeConfig
from gshard_m4.devices import check_devices
from gshard_m4.evaluate_command import Evaluate
from gshard_m4.evaluation_files import BOTH, TRANSLATIONS, read_lines
from gshard_m4.groups import model_for
from gshard_m4.language_names import name_of
from gshard_m4.planned import describe_model, plan_summary
from gshard_m4.prepare import PrepareConfig, prepare
from gshard_m4.step import compile_step, initial_state, make_step
from gshard_m4.text import PreparedText
from gshard_m4.train import train

DATA = Path("data/demo")
LEAST = 50
"""Steps that are trained however long they take."""

_SHOWN = 10  # translations of each test
_TIMED = 8  # steps
_SEED = 0  # of the sentences that are shown


def _corpus() -> PrepareConfig:
    """Few languages that are like each other: what is learnt from one is soon of use for the next."""
    return PrepareConfig(
        output=DATA, only=("es", "pt", "it", "ca"), source_vocabulary=4000, target_vocabulary=3000, tokens=1024,
        length=24,
    )  # fmt: skip


def _training() -> TrainConfig:
    return TrainConfig(steps=4000, warmup_steps=50, cooldown_steps=1200)


@dataclasses.dataclass(frozen=True)
class Demo:
    """Everything once in ten minutes: prepares a small corpus, shows how training is partitioned, trains, translates.

    Attributes:
        run: folder of the run; a number is added if it has a model already.
        devices: accelerators to train on. Without any, training is planned for so many and takes the processor as one
            device, which computes the same numbers sooner than virtual devices that share its cores.
        minutes: of training: as many steps as fit on this machine, but no more than --steps; 0 takes all of them, which
            gives the same numbers everywhere.
        sentences: held-out sentences of each test to score; all if not given.
        corpus: the corpus.
        model: which model.
        train: how to train it.
        search: how to search.
    """

    run: Path = Path("runs/demo")
    devices: int = 8
    minutes: float = 3.75
    sentences: int | None = None
    corpus: tyro.conf.OmitArgPrefixes[PrepareConfig] = dataclasses.field(default_factory=_corpus)
    model: tyro.conf.OmitArgPrefixes[ModelChoice] = dataclasses.field(default_factory=ModelChoice)
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = dataclasses.field(default_factory=_training)
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)

    @property
    def virtual_devices(self) -> int:
        """Planning needs no devices."""
        return 1

    def __call__(self) -> int:
        """Runs the demo."""
        began = time.perf_counter()
        virtual = jax.default_backend() == "cpu"
        if not virtual:
            check_devices(self.devices)
        print("preparing a corpus of translated texts of programs (downloads 54 MB the first time)", flush=True)
        print(prepare(self.corpus))
        text = PreparedText.load(self.corpus.folder)
        model = model_for(self.model, text, self.devices, self.train)
        run = _unused(self.run)
        runs.remember_corpus(run, self.corpus.folder)
        print(describe_model(model))
        if model.partitions > 1:
            print(plan_summary(model, self.train, text.batch(0)))
        if virtual and model.partitions > 1:
            print("\nno accelerators here: training takes the processor as one device, which computes the same numbers")
            model = on_devices(model, 1)
        options = self.train
        if self.minutes and options.steps > LEAST:
            print("\nmeasuring how long a step takes here ...", flush=True)
            options = within(options, seconds_per_step(model, options, text.batch), self.minutes)
        print(f"\ntraining {options.steps:,} steps", flush=True)
        result = train(model, options, run, text.batch, text.held_out(), meta={"vocabularies": text.fingerprint})
        before, *_, after = result.held_out.values()
        print(
            f"trained: {result.tokens_per_second:,.0f} target tokens/s, {result.seconds_per_step:.2f} s a step, "
            f"{result.compile_seconds:.0f} s to compile\n"
            f"cross entropy of sentences with new English: {before:.2f} before, {after:.2f} after training"
        )
        Evaluate(self.corpus.folder, run.directory, sentences=self.sentences, search=self.search)()
        for held in BOTH:
            folder = run.directory / "evaluation" / held.folder
            if (folder / TRANSLATIONS).exists():
                print(f"\n{held.name}, {drawn(folder)}")
        print(
            f"\nwhat it cannot do yet: languages other than {', '.join(map(name_of, text.languages))};\n"
            f"sentences of more than {text.length - 1} tokens; text that is not of the kind that programs show.\n"
            f"More English and longer training help, see packages/m4/docs/training.md.\n\n"
            f"{(time.perf_counter() - began) / 60:.1f} minutes in all; the model "
            f"is in {run.directory}\n{what_next(run.directory)}"
        )
        return 0


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


def drawn(folder: Path) -> str:
    """Some of the translations of an evaluation, drawn at random."""
    rows = read_lines(folder)
    count = min(_SHOWN, len(rows))
    picked = np.random.default_rng(_SEED).choice(len(rows), count, replace=False)
    lines = [f"{count} of {len(rows)} drawn at random (seed {_SEED}):"]
    for language, source, english, written in (rows[at] for at in sorted(picked)):
        lines.append(f"  [{language}] {source}\n    reference: {english}\n    model:     {written}")
    return "\n".join(lines)


def _unused(folder: Path) -> Run:
    """The run of this name, or of the first numbered name that has no checkpoint."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in range(1, 10_000))
    return next(run for run in map(Run, names) if not run.checkpoints.exists())
