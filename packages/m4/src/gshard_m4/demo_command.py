"""``gshard-m4 demo``: what the demo trains, and how long."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
import tyro

from gshard_m4 import runs
from gshard_m4.config import ModelChoice, Run, TrainConfig
from gshard_m4.decode import DecodeConfig
from gshard_m4.demo import demo, what_next
from gshard_m4.devices import check_devices
from gshard_m4.groups import model_for
from gshard_m4.prepare import PrepareConfig, open_text, prepare

DATA = Path("data/demo")


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
    minutes: float = 4.5
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
        text = open_text(self.corpus.folder)
        model = model_for(self.model, text, self.devices, self.train)
        run = _unused(self.run)
        runs.remember_corpus(run, self.corpus.folder)
        demo(
            text, model, self.train, run, self.search, devices=1 if virtual else self.devices, minutes=self.minutes,
            sentences=self.sentences, began=began,
        )  # fmt: skip
        print(what_next(run.directory))
        return 0


def _unused(folder: Path) -> Run:
    """The run of this name, or of the first numbered name that has no checkpoint."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in range(1, 10_000))
    return next(run for run in map(Run, names) if not run.checkpoints.exists())
