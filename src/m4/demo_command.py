"""``m4 demo``: what the demo trains, and how long."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import tyro

from m4 import runs
from m4.config import ModelChoice, Run, TrainConfig
from m4.decode import DecodeConfig
from m4.demo import demo, what_next
from m4.devices import check_devices
from m4.groups import model_for
from m4.prepare import PrepareConfig, open_text, prepare

DATA = Path("data/demo")


def _corpus() -> PrepareConfig:
    """Few languages: in these minutes, a model reads four often enough to tell their words apart, and not forty."""
    return PrepareConfig(
        output=DATA, languages=4, source_vocabulary=5000, target_vocabulary=3000, tokens=2048, length=32
    )


def _training() -> TrainConfig:
    return TrainConfig(steps=4000, warmup_steps=50, cooldown_steps=1200)


@dataclasses.dataclass(frozen=True)
class Demo:
    """Everything once in ten minutes: prepares a small corpus, shows how training is partitioned, trains, translates.

    Attributes:
        run: folder of the run; a number is added if it has a model already.
        devices: devices to train on; on a machine without accelerators they are virtual ones.
        minutes: of training: as many steps as fit on this machine, but no more than --steps; 0 takes all of them, which
            gives the same numbers everywhere.
        sentences: held-out sentences of each test to score.
        corpus: the corpus.
        model: which model.
        train: how to train it.
        search: how to search.
    """

    run: Path = Path("runs/demo")
    devices: int = 8
    minutes: float = 6.0
    sentences: int = 300
    corpus: tyro.conf.OmitArgPrefixes[PrepareConfig] = dataclasses.field(default_factory=_corpus)
    model: tyro.conf.OmitArgPrefixes[ModelChoice] = dataclasses.field(default_factory=ModelChoice)
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = dataclasses.field(default_factory=_training)
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)

    def __call__(self) -> int:
        """Runs the demo."""
        began = time.perf_counter()
        check_devices(self.devices)
        print("preparing a corpus of translated texts of programs (downloads 54 MB the first time)", flush=True)
        print(prepare(self.corpus))
        text = open_text(self.corpus.folder)
        model = model_for(self.model, text, self.devices, self.train)
        run = _unused(self.run)
        runs.remember_corpus(run, self.corpus.folder)
        demo(
            text, model, self.train, run, self.search, minutes=self.minutes, sentences=self.sentences, began=began
        )  # fmt: skip
        print(what_next(run.directory))
        return 0


def _unused(folder: Path) -> Run:
    """The run of this name, or of the first numbered name that has no checkpoint."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in range(1, 10_000))
    return next(run for run in map(Run, names) if not run.checkpoints.exists())
