"""Trains dense and Mixture-of-Experts models and writes packages/m4/docs/results.md: what experts and depth bring.

    gshard-m4 prepare --tier base --source-vocabulary 8000 --target-vocabulary 4000 --length 32 --tokens 1024 \
        --only it fr pt de es ru nl ca sv pl cs da tr uk hu fi --output data/sixteen
    python scripts/scaling.py --data data/sixteen --size cpu --machine "one core of a CPU"

There are two parts. Part ``resources`` is the question of the paper's Figure 6: which languages gain from experts? The
languages with the most text are dealt out to three groups. A group has few pairs in one trial, more in the next and
most in the third, while the other groups have the other sizes (a Latin square). So each language is low-resource,
medium and high, and what is compared is the size of its text and not the language. Part ``depth`` is the question of
the paper's Table 2 and Figure 1: do deeper models need fewer tokens, and fewer FLOPs, to reach a loss?

Both parts measure the cross entropy of all sentences of the test of new English, of any length. A trial is one training
with one seed. The script trains all models with one seed before it begins the next seed. If you stop it, the same
command continues the trial from its checkpoint. ``--minutes`` ends the script after so many minutes; the exit code is
then 75. ``--part`` trains one of the parts, so that two processes can share the work. When the script ends, it writes
the page from the seeds with which all models are trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from resumable import AGAIN, ROOT
from scaling_page import write

import gshard
from gshard_m4 import score_command
from gshard_m4.batches import Batches
from gshard_m4.compilation_cache import keep_compiled
from gshard_m4.config import ModelChoice, Run, TrainConfig
from gshard_m4.corpus.hold_out import DEV, TEST
from gshard_m4.decode import DecodeConfig
from gshard_m4.encoded import Encoded
from gshard_m4.step import compile_step, initial_state, make_step
from gshard_m4.stopping import asked_to_stop
from gshard_m4.text import PreparedText
from gshard_m4.train import train
from gshard_m4.translate import load

DENSE = "dense"
GROUPS = 3
PARTS = ("resources", "depth")
RESULT = "result.json"
NATS = "nats.npy"


@dataclasses.dataclass(frozen=True)
class Size:
    """The models of a comparison, and how long they train.

    Attributes:
        resources: name -> model; the dense one first. They have the same FLOPs for a token.
        depth: name -> model, of different depths and numbers of experts.
        languages: of the corpus, those with the most text; a multiple of `GROUPS`.
        pairs: training pairs of a language in each of the sizes, `GROUPS` of them, ascending.
        steps, cooldown: of the models of ``resources``; the learning rate falls in the last ``cooldown`` steps.
        depth_steps: of the models of ``depth``, whose learning rate is not lowered: their losses are compared at each
            number of tokens.
        measured: steps between measurements of the dev part.
        tokens: of a batch on each side.
        training: what all trainings have in common.
    """

    resources: Mapping[str, ModelChoice]
    depth: Mapping[str, ModelChoice]
    languages: int
    pairs: tuple[int, int, int]
    steps: int
    cooldown: int
    depth_steps: int
    measured: int
    tokens: int
    training: TrainConfig


def _models(base: ModelChoice, experts: Sequence[int], hidden: int) -> dict[str, ModelChoice]:
    """A dense model, and models of experts that take its FLOPs: two experts for a token in every other layer."""
    dense = dataclasses.replace(base, experts=0, hidden_dim=3 * hidden // 2)
    return {DENSE: dense} | {f"moe-{n}": dataclasses.replace(base, experts=n, hidden_dim=hidden) for n in experts}


def _depths(base: ModelChoice, layers: Sequence[int], experts: Sequence[int]) -> dict[str, ModelChoice]:
    """Models of each depth with each number of experts."""
    return {f"{n}e-{m}l": dataclasses.replace(base, layers=m, experts=n) for n in experts for m in layers}


_TINY = ModelChoice(preset="demo", model_dim=16, hidden_dim=32)
_NARROW = ModelChoice(preset="demo", model_dim=64, hidden_dim=512, dropout=0.05, groups=1)
_LARGE = ModelChoice(preset="moe-8e-12l", dtype="bfloat16", dropout=0.1)
SIZES = {
    # To see that everything works: a minute, and no result.
    "smallest": Size(
        _models(_TINY, (2, 4), 32), _depths(_TINY, (4, 8), (2,)), 3, (10, 20, 40), 12, 4, 8, 4, 256,
        TrainConfig(warmup_steps=5, peak_step=8),
    ),
    # Narrow models, which a core of a CPU trains in minutes.
    "cpu": Size(
        _models(_NARROW, (8, 32), 512), _depths(_NARROW, (4, 8), (8, 32)), 12, (1500, 8000, 40_000), 4000, 1000, 2000,
        250, 1024, TrainConfig(warmup_steps=100, peak_step=400),
    ),
    "gpu": Size(
        _models(_LARGE, (8, 32, 128), 2048), _depths(_LARGE, (12, 24), (8, 32)), 24, (5000, 30_000, 200_000), 20_000,
        2000, 14_000, 1000, 16_384, TrainConfig(warmup_steps=500, peak_step=1000, learning_rate=0.4),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training: a model, a seed, and the text that it is trained on.

    Attributes:
        part: of the experiment.
        model: its name.
        seed: of the weights and of the order of the text.
        pairs: language -> training pairs, at most.
    """

    part: str
    model: str
    seed: int
    pairs: Mapping[str, int]

    @property
    def folder(self) -> str:
        """Where it lies among the runs."""
        return f"{self.part}-{self.model}-seed-{self.seed}"


def trials(size: Size, languages: Sequence[str], seeds: int, parts: Sequence[str] = PARTS) -> Iterator[Trial]:
    """All trainings, in the order in which they are taken.

    Args:
        size: of the experiment.
        languages: those that are trained on, in the order of their text.
        seeds: number of seeds. With `GROUPS` of them, or a multiple, each language has each size equally often.
        parts: of the experiment.
    """
    for seed in range(seeds):
        for part in parts:
            for model in getattr(size, part):
                sizes = {
                    code: size.pairs[(at + seed) % GROUPS if part == "resources" else GROUPS - 1]
                    for at, code in enumerate(languages)
                }
                yield Trial(part, model, seed, sizes)


def most_text(data: Encoded, length: int, size: Size) -> list[str]:
    """The languages of the experiment: those with the most pairs that fit.

    Args:
        data: all training pairs.
        length: the longest sentence that fits, in tokens.
        size: of the experiment.

    Raises:
        SystemExit: too few languages have enough pairs.
    """
    count = np.bincount(np.asarray(data.language)[data.lengths <= length], minlength=len(data.languages))
    order = [int(at) for at in np.argsort(-count, kind="stable")[: size.languages]]
    if len(order) < size.languages or count[order[-1]] < size.pairs[-1]:
        enough = int((count >= size.pairs[-1]).sum())
        sys.exit(
            f"{size.languages} languages with {size.pairs[-1]:,} training pairs of up to {length} tokens are needed; "
            f"the corpus has {enough}: {', '.join(f'{data.languages[at]} {count[at]:,}' for at in order)}"
        )
    return [data.languages[at] for at in order]


def some_pairs(data: Encoded, length: int, pairs: Mapping[str, int]) -> np.ndarray:
    """The places of a trial's pairs, int64 [N]: the first of a fixed order, so a smaller text is part of a larger one.

    Args:
        data: all training pairs.
        length: the longest sentence that fits, in tokens.
        pairs: language -> how many.
    """
    fits = data.lengths <= length
    rows = []
    for code, count in pairs.items():
        number = data.languages.index(code)
        own = np.flatnonzero((np.asarray(data.language) == number) & fits)
        rows.append(np.random.default_rng((7, number)).permutation(own)[:count])
    return np.sort(np.concatenate(rows))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What the command line asked for.

    Attributes:
        text: the prepared corpus.
        size: of the experiment.
        runs: folder of trainings and what was measured.
        until: the moment (``time.monotonic``) at which the script ends.
    """

    text: PreparedText
    size: Size
    runs: Path
    until: float

    def languages(self) -> list[str]:
        """Those that are trained on and tested."""
        return most_text(self.text.batches.data, self.text.length, self.size)

    def trained(self, trial: Trial, asked: Callable[[], bool]) -> bool:
        """Takes a training to its end and measures it.

        Args:
            trial: what is trained.
            asked: whether the script was asked to stop.

        Returns:
            Whether the training has ended; if not, the time is over.
        """
        run = Run(self.runs / trial.folder)
        result = run.directory / RESULT
        if result.exists():
            return True
        size, text = self.size, self.text
        depth = trial.part == "depth"
        choice = getattr(size, trial.part)[trial.model]
        model = choice.transformer(text.source_vocabulary, text.target_vocabulary)
        options = dataclasses.replace(
            size.training, steps=size.depth_steps if depth else size.steps, seed=trial.seed,
            cooldown_steps=0 if depth else size.cooldown, evaluate_every=size.measured, save_minutes=2.0, keep=1,
        )  # fmt: skip
        data = text.batches.data
        rows = some_pairs(data, text.length, trial.pairs)
        tags = tuple(text.tag(name) for name in data.languages)
        batches = Batches(data.only(rows), size.tokens, text.length, text.temperature, trial.seed, tags)
        print(f"{trial.folder}: {len(rows):,} pairs", flush=True)
        found = train(
            model, options, run, batches.batch,
            text.rebatched(tokens=size.tokens).of_languages(self.languages()).held_out(DEV),
            meta={"vocabularies": text.fingerprint, "only": sorted(trial.pairs)}, resume=True,
            stop=lambda: time.monotonic() > self.until or asked(),
        )  # fmt: skip
        if found.stopped:
            return False
        english, nats, tokens, language = self.tested(run)
        np.save(run.directory / NATS, nats)
        state = jax.eval_shape(lambda: initial_state(model, 0))
        step = compile_step(make_step(model, options), gshard.Mesh.abstract(device=1))
        flops = gshard.explain(step, state, dict(batches.batch(0))).cost().flops
        weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state["params"]))
        said = {
            "trial": dataclasses.asdict(trial), "options": dataclasses.asdict(choice), "weights": weights,
            "flops_a_step": flops, "seconds": sum(r["seconds"] for r in records(run)),
            "curve": curve(records(run)), "english": english, "tokens": tokens, "language": language,
        }  # fmt: skip
        result.write_text(json.dumps(said), "utf-8")
        return True

    def tested(self, run: Run) -> tuple[list[int], np.ndarray, list[int], list[str]]:
        """The test of new English: numbers of the English sentences, nats, tokens and language of each pair."""
        text = self.text.of_languages(self.languages())
        examples = text.examples(None, TEST)
        values, _ = score_command.nats(load(run, self.text, DecodeConfig()), examples)
        numbers: dict[str, int] = {}
        english = [numbers.setdefault(pair.english, len(numbers)) for pair in examples]
        nats, tokens = zip(*values, strict=True)
        return english, np.array(nats), list(tokens), [pair.language for pair in examples]


def records(run: Run) -> list[dict]:
    """The metrics of a training, a record for each step."""
    return [json.loads(line) for line in run.metrics.read_text("utf-8").splitlines()]


def curve(steps: Sequence[Mapping[str, float]]) -> list[tuple[int, float, float]]:
    """Where the dev part was measured: number of the step, target tokens so far, cross entropy."""
    tokens = list(itertools.accumulate(step["tokens"] for step in steps))
    return [(n, tokens[n - 1], step["held_out"]) for n, step in enumerate(steps, 1) if "held_out" in step]


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains what is not trained yet, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that gshard-m4 prepare made")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model")
    parser.add_argument("--part", choices=PARTS, nargs="*", default=PARTS, help="only this part is trained")
    parser.add_argument("--runs", type=Path, help="where trainings are kept; runs/scaling-SIZE by default")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, to be continued")
    parser.add_argument("--machine", default="a machine that was not named", help="in words, for the page")
    parser.add_argument("--page", type=Path, default=ROOT / "packages" / "m4" / "docs" / "results.md")
    given = parser.parse_args(arguments)
    if given.seeds < 1:
        parser.error(f"cannot train with {given.seeds} seeds: give 1 or more")
    keep_compiled()
    size, runs = SIZES[given.size], given.runs or Path("runs") / f"scaling-{given.size}"
    until = time.monotonic() + 60 * given.minutes
    text = PreparedText.load(given.data)
    experiment = Experiment(text, size, runs, until)
    languages = experiment.languages()
    again = shlex.join(["python", "scripts/scaling.py", *(arguments or sys.argv[1:])])
    over = True
    with asked_to_stop() as asked:
        for trial in trials(size, languages, given.seeds, given.part):
            if not experiment.trained(trial, asked):
                over = False
                break
    write(given.page, list(trials(size, languages, given.seeds)), runs, text, size, given.machine, again)
    return 0 if over else AGAIN


if __name__ == "__main__":
    sys.exit(main())
