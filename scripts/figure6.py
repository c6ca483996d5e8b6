"""Trains dense and Mixture-of-Experts models at equal FLOPs and steps, scores them, and writes docs/results.md.

    gshard-m4 prepare --tier base --source-vocabulary 32000 --target-vocabulary 8000 --output data/base-small
    python scripts/figure6.py --data data/base-small --size cpu --machine "two CPU cores"

The question is that of the paper's Figure 6: do more experts translate better, and which languages gain? All models of
a size take the same steps on the same batches, and the dense one has hidden layers wide enough for the FLOPs of two
experts. They are scored on both tests of the corpus (docs/translating.md), and so are models of single languages.

With --slice-minutes the script ends by itself after about so many minutes, with exit code 75 if there is more to do:
the same line goes on where it was, in the middle of a training from its checkpoint. Nothing here is chosen by the
tests: what is to be chosen (--training) is chosen by the cross entropy of the dev parts, which is on the page, too.
Sizes with choices of training try them first. With more --steps than before, the same models go on; those whose
learning rate falls at the end go on from before that.
"""

import argparse
import dataclasses
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from figure6_job import DENSE, DONE, SIZES, Job, manifest, taken
from figure6_page import write

ROOT = Path(__file__).resolve().parent.parent
M4 = [sys.executable, "-m", "gshard_m4"]
STOPPED, AGAIN = 143, 75
SAVING = 20  # seconds that stopping may take
SCORING = 240  # seconds that a slice must have left to begin scoring


class SliceOverError(Exception):
    """The time of this slice is used up."""


def asked() -> Job:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that gshard-m4 prepare made")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--runs", type=Path, help="where models and scores are kept; runs/figure6-SIZE by default")
    parser.add_argument("--steps", type=int, help="of every model of all languages; what the size has by default")
    parser.add_argument("--sentences", type=int, help="scored of each test; what the size has by default")
    parser.add_argument("--training", help="options of gshard-m4 train for all models; what the size has by default")
    parser.add_argument("--alone", nargs="*", default=None, help="languages with a model of their own")
    parser.add_argument(
        "--slice-minutes", type=float, default=float("inf"), help="end after so many, to be gone on with"
    )
    parser.add_argument("--machine", default="a machine that was not named", help="in words, for the page")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    given = parser.parse_args()
    if 60 * given.slice_minutes < SCORING + SAVING:
        parser.error(f"a slice of {given.slice_minutes:g} minutes is too short to score a model in: give 5 or more")
    size = SIZES[given.size]
    if given.training is not None:
        size = dataclasses.replace(size, choices=())
    alone = some(manifest(given.data)["languages"], size.languages) if given.alone is None else tuple(given.alone)
    return Job(
        given.data, given.runs or Path("runs") / f"figure6-{given.size}", size, given.steps or size.steps,
        given.sentences or size.sentences,
        tuple(shlex.split(size.training if given.training is None else given.training)), alone, given.machine,
        given.page, time.monotonic() + 60 * given.slice_minutes,
        shlex.join(["python", "scripts/figure6.py", *sys.argv[1:]]),
    )  # fmt: skip


def some(languages: Mapping[str, int], count: int) -> tuple[str, ...]:
    """Languages from those with much text to those with little, but for the very ends."""
    ordered = sorted(languages, key=lambda name: -languages[name])
    places = np.linspace(0.03, 0.97, count) * (len(ordered) - 1)
    return tuple(dict.fromkeys(ordered[round(place)] for place in places))


def chosen(job: Job, lines: list[list[str]]) -> Job:
    """The job with the choice of training that is best on dev, if there are choices; the models tried go on with it."""
    size = job.size
    if not size.choices:
        return job
    for number, choice in enumerate(size.choices):
        for name in size.piloted:
            lines.append(train(job, job.pilot(number, name), size.models[name], size.pilot_steps, shlex.split(choice)))
    losses = [np.mean([at[name] for name in size.piloted]) for _, at in job.pilots()]
    best = int(np.argmin(losses))
    for name in size.piloted:
        branch(job.runs / job.pilot(best, name), job.runs / name)
    return dataclasses.replace(job, training=(*job.training, *shlex.split(size.choices[best])))


def branch(run: Path, other: Path) -> None:
    """Copies a run, so that it can go on in two ways; what is there already is left as it is."""
    if not other.exists():
        unfinished = other.with_name(f"{other.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(run, unfinished)
        unfinished.rename(other)


def end(job: Job, name: str) -> list[str]:
    """Takes the last steps of a model, in which the learning rate falls to nothing; gives the command line."""
    there, begin = taken(job.runs / name), job.steps - job.size.cooldown
    if not job.run(name).exists() and there != begin:
        sys.exit(
            f"{job.runs / name} has taken {there} steps already: give --steps of {there + job.size.cooldown} or more"
        )
    branch(job.runs / name, job.run(name))
    return train(job, job.ended(name), job.size.models[name], job.steps, ["--cooldown-steps", str(job.size.cooldown)])


def stops(steps: int, cooldown: int, rounds: int) -> list[int]:
    """After how many steps the next model has its turn."""
    return [*((steps - cooldown) * n // (rounds - 1) for n in range(1, rounds)), steps]


def train(job: Job, name: str, options: str, steps: int, extra: Sequence[str] = ()) -> list[str]:
    """Trains until so many steps, or until the slice is over; gives the command line."""
    line = ["train", "--data", str(job.data), "--run", str(job.runs / name), *shlex.split(options), "--devices", "1"]
    line += ["--tokens", str(job.size.tokens), "--save-every", "200", *job.training, *extra, "--steps", str(steps)]
    if taken(job.runs / name) >= steps:
        return line
    if job.seconds_left() < 2 * SAVING:
        raise SliceOverError
    print(f"$ gshard-m4 {shlex.join(line)}", flush=True)
    process = subprocess.Popen([*M4, *line, "--resume"])
    try:
        process.wait(None if job.until == float("inf") else max(job.seconds_left() - SAVING, 1))
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when this script is stopped: m4 saves
        process.terminate()
        process.wait()
    if process.returncode == STOPPED:
        raise SliceOverError
    if process.returncode:
        sys.exit(f"training of {name} ended with {process.returncode}")
    return line


def score(job: Job, name: str, sentences: int, output: Path | None = None, extra: Sequence[str] = ()) -> list[str]:
    """Scores a run on both tests; gives the command line."""
    output = output or job.evaluation(name)
    line = ["evaluate", "--data", str(job.data), "--run", str(job.run(name))]
    line += ["--sentences", str(sentences), "--beam", "4", "--output", str(output), *extra]
    done, of = output / DONE, str(taken(job.run(name)))
    if not done.exists() or done.read_text("utf-8") != of:
        if job.seconds_left() < SCORING:
            raise SliceOverError
        print(f"$ gshard-m4 {shlex.join(line)}", flush=True)
        if code := subprocess.run([*M4, *line]).returncode:
            sys.exit(f"scoring of {name} ended with {code}")
        done.write_text(of, "utf-8")
    return line


def run(job: Job) -> None:
    """Trains and scores everything, and writes the page after each model."""
    lines: list[list[str]] = []
    job = chosen(job, lines)
    size, cooldown = job.size, job.size.cooldown
    for stop in stops(job.steps, cooldown, size.rounds):
        trained = [
            end(job, name) if cooldown and stop == job.steps else train(job, name, options, stop)
            for name, options in size.models.items()
        ]
        lines += trained if cooldown or stop == job.steps else []
    for name in size.models:
        versus = [] if name == DENSE else ["--baselines", str(job.evaluation(DENSE))]
        lines.append(score(job, name, job.sentences, extra=versus))
        write(job, lines)
    each = max(job.sentences // len(manifest(job.data)["languages"]), min(job.sentences, 100))
    slower = ["--cooldown-steps", str(cooldown * size.alone_steps // job.steps)] if cooldown else []
    for code in job.alone:
        lines.append(train(job, f"only-{code}", size.alone, size.alone_steps, [*slower, "--languages", code]))
        lines.append(score(job, f"only-{code}", each, extra=["--each", str(each)]))
    if job.alone:  # the first sentences of a language are the same ones, whatever other languages there are
        versus = [
            "--languages",
            *job.alone,
            "--baselines",
            *(str(job.evaluation(f"only-{code}")) for code in job.alone),
        ]
        for name in size.models:
            lines.append(score(job, name, each * len(job.alone), job.alone_evaluation(name), versus))
        write(job, lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    try:
        run(asked())
    except SliceOverError:
        print("the time of this slice is over; the same line goes on", flush=True)
        sys.exit(AGAIN)
