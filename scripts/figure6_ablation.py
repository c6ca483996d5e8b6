"""Trains a dense model and one of 32 experts under two temperatures, and writes which languages gain in cross entropy.

    python scripts/figure6_ablation.py --data data/sixteen --size narrow --steps 8000 \
        --training "--warmup-steps 100 --peak-step 400 --learning-rate 1" --machine "one core of a CPU"

The question is why docs/results.md does not show that low-resource languages gain most from experts. One explanation:
the temperature of the draws repeats the pairs of low-resource languages, and more experts learn more of them by heart.
So the same models are trained on the same text with a temperature of 1, too, which repeats the pairs of no language
more than those of another. Of every pair it is known how often it was drawn, since batches follow from the seed; so
what is learnt by heart is measured, as the difference between training pairs that were drawn and those that were not.

The page is docs/results_ablation.md. Stopped at any point, the same line goes on where it was, as with figure6.py.
"""

import argparse
import hashlib
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from figure6 import AGAIN, ROOT, STOPPED, SliceOverError, train
from figure6_ablation_page import write
from figure6_job import DENSE, SIZES, Job, manifest, taken
from figure6_losses import Found, Sentences, classes_of, english_drawn, exposure, held_out, nats, times_drawn
from figure6_losses import training_pairs as picked

from gshard_m4.config import Run
from gshard_m4.held_out import KNOWN_ENGLISH, NEW_ENGLISH
from gshard_m4.text import PreparedText

MODELS = (DENSE, "moe-32")
NATURAL = 1.0  # temperature that draws every pair equally often
KNOWN, NEW, TRAINING = KNOWN_ENGLISH.name, NEW_ENGLISH.name, "training"


def asked() -> tuple[Job, int]:
    """Reads the command line: the job, and the training pairs of each language that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that gshard-m4 prepare made")
    parser.add_argument("--size", choices=SIZES, default="narrow")
    parser.add_argument("--runs", type=Path, help="where models and losses are kept; runs/ablation-SIZE by default")
    parser.add_argument("--steps", type=int, help="of every model; what the size has by default")
    parser.add_argument("--training", help="options of gshard-m4 train for all models; what the size has by default")
    parser.add_argument("--each", type=int, default=4000, help="training pairs of each language that are measured")
    parser.add_argument(
        "--slice-minutes", type=float, default=float("inf"), help="end after so many, to be gone on with"
    )
    parser.add_argument("--machine", default="a machine that was not named", help="in words, for the page")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results_ablation.md")
    given = parser.parse_args()
    if given.each < 1:
        parser.error(f"cannot measure {given.each} training pairs of a language: give 1 or more")
    if manifest(given.data)["settings"]["temperature"] == NATURAL:
        parser.error(f"the corpus in {given.data} is drawn with a temperature of 1 already: give one of another")
    size = SIZES[given.size]
    training = tuple(shlex.split(size.training if given.training is None else given.training))
    return Job(
        given.data, given.runs or Path("runs") / f"ablation-{given.size}", size, given.steps or size.steps,
        size.sentences, training, (), given.machine, given.page, time.monotonic() + 60 * given.slice_minutes,
        shlex.join(["python", "scripts/figure6_ablation.py", *sys.argv[1:]]),
    ), given.each  # fmt: skip


def place(temperature: float, name: str) -> str:
    """The folder of a model among the runs."""
    return f"temperature-{temperature:g}/{name}"


def train_all(job: Job, temperatures: Sequence[float]) -> list[list[str]]:
    """Trains every model under every temperature; gives the command lines."""
    lines = []
    for temperature in temperatures:
        for name in MODELS:
            options = ["--cooldown-steps", str(job.size.cooldown), "--temperature", f"{temperature:g}"]
            lines.append(train(job, place(temperature, name), job.size.models[name], job.steps, options))
    return lines


def measure(job: Job, temperatures: Sequence[float], each: int) -> Found:
    """Cross entropies of all models, and how often pairs were drawn; what was measured before is read."""
    text = PreparedText.load(job.data)
    sets = {
        TRAINING: picked(text.batches, each),
        KNOWN: held_out(text, (KNOWN_ENGLISH.dev, KNOWN_ENGLISH.test)),
        NEW: held_out(text, (NEW_ENGLISH.test,)),
    }
    drawn, english, exposures, losses = {}, {}, {}, {}
    classes = classes_of(text.languages)
    for temperature in temperatures:
        batches = text.rebatched(tokens=job.size.tokens, temperature=temperature).batches
        kept = job.runs / place(temperature, f"drawn-{job.steps}.npy")
        if not kept.exists():
            np.save(kept, times_drawn(batches, job.steps))
        count = np.load(kept)
        drawn[temperature] = count[sets[TRAINING].rows]
        of_english = english_drawn(batches.data, count)
        english[temperature] = of_english[sets[TRAINING].rows]
        exposures[temperature] = exposure(batches, count, of_english, classes)
        for name in MODELS:
            for of, sentences in sets.items():
                losses[temperature, name, of] = _nats(job, temperature, name, of, text, sentences)
    return Found(sets, classes, dict(text.languages), drawn, english, exposures, losses)


def _nats(job: Job, temperature: float, name: str, of: str, text: PreparedText, sentences: Sentences) -> np.ndarray:
    """Cross entropies of a set under a model, of a file if they were measured before."""
    folder = job.runs / place(temperature, name)
    steps = taken(folder)
    said = hashlib.sha256(f"{text.fingerprint} {steps}".encode())
    for ids in (sentences.data.source, sentences.data.target):
        said.update(np.asarray(ids, np.int64).tobytes())
    kept = folder / f"nats-{of.replace(' ', '-')}-{said.hexdigest()[:12]}.npy"
    if not kept.exists():
        print(f"cross entropy of {len(sentences.data):,} pairs, {of}, under {folder} ...", flush=True)
        np.save(kept, nats(Run(folder), text.rebatched(tokens=job.size.tokens).batches.shape, sentences))
    return np.load(kept)


def run(job: Job, each: int) -> None:
    """Trains, measures, and writes the page."""
    temperatures = (float(manifest(job.data)["settings"]["temperature"]), NATURAL)
    lines = train_all(job, temperatures)
    write(job, measure(job, temperatures, each), lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    try:
        run(*asked())
    except SliceOverError:
        print("the time of this slice is over; the same line goes on", flush=True)
        sys.exit(AGAIN)
