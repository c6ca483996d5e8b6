"""What scripts/figure6.py compares: the models of each size, how long they train, and where their scores are."""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path

from gshard_m4 import checkpoint
from gshard_m4.config import Run
from gshard_m4.held_out import HeldOut

DENSE, DONE = "dense", "done"
PILOT = "pilot"


@dataclasses.dataclass(frozen=True)
class Size:
    """The models of a comparison, and how long they train.

    Attributes:
        models: name -> options of gshard-m4 train; the dense one first.
        alone: options of the models of one language.
        languages: that have a model of their own.
        training: options of all models, by default.
        steps: of the models of all languages.
        alone_steps: of the models of one language.
        tokens: of a batch on each side.
        sentences: scored of each test.
        rounds: in which the models take their steps, one model after the other in each: a comparison that is cut short
            is still one of equal steps.
        cooldown: steps at the end in which the learning rate falls to nothing, of every model. They are taken in a copy
            of the run, which itself can go on to more steps.
        choices: options of training, of which one is taken for all models: the one that leads to the lowest mean cross
            entropy of the dev part of new English after ``pilot_steps`` of the models ``piloted``.
        piloted: names of models.
        pilot_steps: taken with each choice, and gone on from with the one that is taken.
    """

    models: Mapping[str, str]
    alone: str
    languages: int
    training: str
    steps: int
    alone_steps: int
    tokens: int
    sentences: int
    rounds: int = 1
    cooldown: int = 0
    choices: tuple[str, ...] = ()
    piloted: tuple[str, ...] = ()
    pilot_steps: int = 0


_TINY = "--preset moe-8e-4l --model-dim 32"
_NARROW = "--preset demo --model-dim 64 --dropout 0.05"  # M = 64, H = 8 M as in the paper
SIZES = {
    # To see that everything works: minutes, and no result.
    "smallest": Size(
        {
            DENSE: f"{_TINY} --experts 0 --hidden-dim 96", "moe-8": f"{_TINY} --hidden-dim 64",
            "moe-32": f"{_TINY} --hidden-dim 64 --experts 32",
        },
        f"{_TINY} --experts 0 --hidden-dim 96", 2, "--warmup-steps 5", 20, 10, 512, 40,
        rounds=2, cooldown=5, choices=("--learning-rate 0.5", "--learning-rate 1"), piloted=(DENSE, "moe-8"),
        pilot_steps=5,
    ),
    # Some languages on one core: narrow models, which sixteen languages fill, and many small steps.
    "narrow": Size(
        {
            DENSE: f"{_NARROW} --experts 0 --hidden-dim 768", "moe-8": f"{_NARROW} --hidden-dim 512 --groups 1",
            "moe-32": f"{_NARROW} --hidden-dim 512 --groups 1 --experts 32",
        },
        f"{_NARROW} --experts 0 --hidden-dim 256", 3, "--warmup-steps 100 --peak-step 400",
        3000, 1000, 1024, 1600,
        rounds=2, cooldown=1000, choices=("--learning-rate 0.4", "--learning-rate 1"), piloted=(DENSE, "moe-8"),
        pilot_steps=500,
    ),
    "cpu": Size(
        {DENSE: "--preset dense-4l-wide", "moe-8": "--preset moe-8e-4l", "moe-32": "--preset moe-32e-4l"},
        "--preset bilingual-4l", 5, "--learning-rate 0.4 --warmup-steps 100 --peak-step 400 --dropout 0.1",
        20_000, 2000, 2048, 2000,
    ),
    "gpu": Size(
        {
            DENSE: "--preset dense-12l-wide --dtype bfloat16", "moe-8": "--preset moe-8e-12l --dtype bfloat16",
            "moe-32": "--preset moe-32e-12l --dtype bfloat16", "moe-128": "--preset moe-128e-12l --dtype bfloat16",
        },
        "--preset bilingual-4l --dtype bfloat16", 5,
        "--learning-rate 0.4 --warmup-steps 500 --peak-step 1000 --cooldown-steps 2000 --dropout 0.1",
        8000, 2000, 16_384, 5000,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """What was asked for on the command line."""

    data: Path
    runs: Path
    size: Size
    steps: int
    sentences: int
    training: tuple[str, ...]
    alone: tuple[str, ...]
    machine: str
    page: Path
    until: float
    asked: str

    def ended(self, name: str) -> str:
        """The name of the run that a model ends in: a branch of its own where the learning rate falls at the end."""
        return f"{name}-{self.steps}" if self.size.cooldown and name in self.size.models else name

    def run(self, name: str) -> Path:
        """The folder of a model that has taken all its steps."""
        return self.runs / self.ended(name)

    def evaluation(self, name: str, held: HeldOut | None = None) -> Path:
        """Where the scores of a model are."""
        return self.run(name) / "evaluation" / (held.folder if held else "")

    def alone_evaluation(self, name: str, held: HeldOut | None = None) -> Path:
        """Where the scores of a model are beside those of models of one language."""
        return self.run(name) / "beside-one-language" / (held.folder if held else "")

    def seconds_left(self) -> float:
        """Of this slice."""
        return self.until - time.monotonic()

    def pilot(self, choice: int, name: str) -> str:
        """The name of a run that a choice of training is tried with."""
        return f"{PILOT}-{choice}/{name}"

    def pilots(self) -> list[tuple[str, dict[str, float]]]:
        """Each choice of training with the held-out cross entropies of the models that have taken its steps."""
        found = []
        for number, choice in enumerate(self.size.choices):
            losses = {name: held_out(self.runs / self.pilot(number, name)) for name in self.size.piloted}
            at = {name: loss[self.size.pilot_steps] for name, loss in losses.items() if self.size.pilot_steps in loss}
            found.append((choice, at))
        return found


def manifest(data: Path) -> dict:
    """What gshard-m4 prepare wrote down."""
    return json.loads((data / "manifest.json").read_text("utf-8"))


def records(run: Path) -> list[dict]:
    """The metrics of a run, a record for each step."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def held_out(run: Path) -> dict[int, float]:
    """Number of steps -> cross entropy of the dev part of new English after them, where it was measured."""
    return {number: record["held_out"] for number, record in enumerate(records(run), 1) if "held_out" in record}


def taken(run: Path) -> int:
    """The steps that a run has saved."""
    return max(checkpoint.steps(Run(run).checkpoints), default=0)
