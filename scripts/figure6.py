"""Trains dense and Mixture-of-Experts models at equal FLOPs and steps, scores them, and writes docs/results.md.

    m4 prepare --tier base --source-vocabulary 32000 --target-vocabulary 8000 --output data/base-small
    python scripts/figure6.py --data data/base-small --size cpu --machine "two CPU cores"

The question is that of the paper's Figure 6: do more experts translate better, and which languages gain? All models of
a size take the same steps on the same batches, and the dense one has hidden layers wide enough for the FLOPs of two
experts. They are scored on both tests of the corpus (docs/translating.md), and so are models of single languages.

With --slice-minutes the script ends by itself after about so many minutes, with exit code 75 if there is more to do:
the same line goes on where it was, in the middle of a training from its checkpoint. Nothing here is chosen by the
tests: what is to be chosen (--training) is chosen by the cross entropy of the dev parts, which is on the page, too.
"""

import argparse
import csv
import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from m4 import evaluate, figure
from m4.evaluate import CLASSES, Results
from m4.held_out import BOTH, HeldOut

ROOT = Path(__file__).resolve().parent.parent
M4 = [sys.executable, "-m", "m4"]
STOPPED, AGAIN = 143, 75
DENSE, DONE = "dense", "done"
LAST = 500  # steps whose training cross entropy is told
SAVING = 20  # seconds that stopping may take
SCORING = 240  # seconds that a slice must have left to begin scoring


@dataclasses.dataclass(frozen=True)
class Size:
    """The models of a comparison, and how long they train.

    Attributes:
        models: name -> options of m4 train; the dense one first.
        alone: options of the models of one language.
        languages: that have a model of their own.
        training: options of all models, by default.
        steps: of the models of all languages.
        alone_steps: of the models of one language.
        tokens: of a batch on each side.
        sentences: scored of each test.
    """

    models: Mapping[str, str]
    alone: str
    languages: int
    training: str
    steps: int
    alone_steps: int
    tokens: int
    sentences: int


_TINY = "--preset moe-8e-4l --model-dim 32"
SIZES = {
    # To see that everything works: a minute, and no result.
    "smallest": Size(
        {
            DENSE: f"{_TINY} --experts 0 --hidden-dim 96", "moe-8": f"{_TINY} --hidden-dim 64",
            "moe-32": f"{_TINY} --hidden-dim 64 --experts 32",
        },
        f"{_TINY} --experts 0 --hidden-dim 96", 2, "--warmup-steps 5", 20, 10, 512, 40,
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


class SliceOverError(Exception):
    """The time of this slice is used up."""


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

    def evaluation(self, name: str, held: HeldOut | None = None) -> Path:
        """Where the scores of a run are."""
        return self.runs / name / "evaluation" / (held.folder if held else "")

    def alone_evaluation(self, name: str, held: HeldOut | None = None) -> Path:
        """Where the scores of a run are beside those of models of one language."""
        return self.runs / name / "beside-one-language" / (held.folder if held else "")

    def seconds_left(self) -> float:
        """Of this slice."""
        return self.until - time.monotonic()


def asked() -> Job:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that m4 prepare made")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--runs", type=Path, help="where models and scores are kept; runs/figure6-SIZE by default")
    parser.add_argument("--steps", type=int, help="of every model of all languages; what the size has by default")
    parser.add_argument("--sentences", type=int, help="scored of each test; what the size has by default")
    parser.add_argument("--training", help="options of m4 train for all models; what the size has by default")
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
    alone = some(manifest(given.data)["languages"], size.languages) if given.alone is None else tuple(given.alone)
    return Job(
        given.data, given.runs or Path("runs") / f"figure6-{given.size}", size, given.steps or size.steps,
        given.sentences or size.sentences,
        tuple(shlex.split(size.training if given.training is None else given.training)), alone, given.machine,
        given.page, time.monotonic() + 60 * given.slice_minutes,
        shlex.join(["python", "scripts/figure6.py", *sys.argv[1:]]),
    )  # fmt: skip


def manifest(data: Path) -> dict:
    """What m4 prepare wrote down."""
    return json.loads((data / "manifest.json").read_text("utf-8"))


def some(languages: Mapping[str, int], count: int) -> tuple[str, ...]:
    """Languages from those with much text to those with little, but for the very ends."""
    ordered = sorted(languages, key=lambda name: -languages[name])
    places = np.linspace(0.03, 0.97, count) * (len(ordered) - 1)
    return tuple(dict.fromkeys(ordered[round(place)] for place in places))


def records(run: Path) -> list[dict]:
    """The metrics of a run, a record for each step."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def train(job: Job, name: str, options: str, steps: int, extra: Sequence[str] = ()) -> list[str]:
    """Trains to the last step, or until the slice is over; gives the command line."""
    line = ["train", "--data", str(job.data), "--run", str(job.runs / name), *shlex.split(options), "--devices", "1"]
    line += ["--tokens", str(job.size.tokens), "--save-every", "200", *job.training, *extra, "--steps", str(steps)]
    done = job.runs / name / "trained.json"
    if done.exists():
        return line
    if job.seconds_left() < 2 * SAVING:
        raise SliceOverError
    print(f"$ m4 {shlex.join(line)}", flush=True)
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
    done.write_text(json.dumps({"steps": len(records(job.runs / name))}))
    return line


def score(job: Job, name: str, sentences: int, output: Path | None = None, extra: Sequence[str] = ()) -> list[str]:
    """Scores a run on both tests; gives the command line."""
    output = output or job.evaluation(name)
    line = ["evaluate", "--data", str(job.data), "--run", str(job.runs / name)]
    line += ["--sentences", str(sentences), "--beam", "4", "--output", str(output), *extra]
    if not (output / DONE).exists():
        if job.seconds_left() < SCORING:
            raise SliceOverError
        print(f"$ m4 {shlex.join(line)}", flush=True)
        if code := subprocess.run([*M4, *line]).returncode:
            sys.exit(f"scoring of {name} ended with {code}")
        (output / DONE).touch()
    return line


def run(job: Job) -> None:
    """Trains and scores everything, and writes the page after each model."""
    lines = []
    for name, options in job.size.models.items():
        lines.append(train(job, name, options, job.steps))
        versus = [] if name == DENSE else ["--baselines", str(job.evaluation(DENSE))]
        lines.append(score(job, name, job.sentences, extra=versus))
        write(job, lines)
    each = max(job.sentences // len(manifest(job.data)["languages"]), min(job.sentences, 100))
    for code in job.alone:
        lines.append(train(job, f"only-{code}", job.size.alone, job.size.alone_steps, ["--languages", code]))
        lines.append(score(job, f"only-{code}", each, extra=["--each", str(each)]))
    if job.alone:  # the first sentences of a language are the same ones, whatever other languages there are
        versus = [
            "--languages",
            *job.alone,
            "--baselines",
            *(str(job.evaluation(f"only-{code}")) for code in job.alone),
        ]
        for name in job.size.models:
            lines.append(score(job, name, each * len(job.alone), job.alone_evaluation(name), versus))
        write(job, lines)


def write(job: Job, lines: Sequence[Sequence[str]]) -> None:
    """Writes the page and its figures from what is there."""
    there = [name for name in job.size.models if (job.evaluation(name) / DONE).exists()]
    parts = [HEAD, corpus(job), models(job, there)]
    for held in BOTH:
        parts += [versus_dense(job, held, there), draw(job, held, there)]
    parts += [versus_one_language(job, there), again(job, lines)]
    job.page.parent.mkdir(parents=True, exist_ok=True)
    job.page.write_text("\n".join(filter(None, parts)), "utf-8")
    print(f"written: {job.page}", flush=True)


HEAD = """# Results

<!-- Written by scripts/figure6.py from what it measured: change that, not this. -->

Do more experts translate better with the same compute, and which languages gain? Models of this page have the same
FLOPs for a token, took the same steps on the same batches, and were trained once, with the seed 0. They are scored on
two tests ([Translating](translating.md)): *known English*, pairs that are new although other languages have their
English in training, and *new English*, which is in no training pair.
"""


def corpus(job: Job) -> str:
    """What was trained on."""
    m = manifest(job.data)
    return f"""## The text

The tier `{m["settings"]["tier"]}` of [the corpus](corpus.md): {m["pairs"]["train"]:,} training pairs in
{len(m["languages"])} languages, drawn with a temperature of {m["settings"]["temperature"]:g}; vocabularies of
{m["source_vocabulary"]:,} and {m["target_vocabulary"]:,} pieces; batches of {job.size.tokens:,} tokens on each side.
Nobody is told the language of a sentence when it is scored.
"""


def models(job: Job, there: Sequence[str]) -> str:
    """A row for each model that has been scored."""
    rows = [
        "## The models\n",
        "| model | options | steps | target tokens | minutes of steps | cross entropy, training | known | new |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in there:
        taken = records(job.runs / name)
        known, new = (Results.load(job.evaluation(name, held)).cross_entropy for held in BOTH)
        tokens, seconds = (sum(r[key] for r in taken) for key in ("tokens", "seconds"))
        rows.append(
            f"| {name} | `{job.size.models[name]}` | {len(taken):,} | {tokens / 1e6:.2f} M | {seconds / 60:.1f} "
            f"| {np.mean([r['cross_entropy'] for r in taken[-LAST:]]):.3f} | {known:.3f} | {new:.3f} |"
        )
    return "\n".join(rows) + (
        f"\n\nCross entropy is in nats for each token: of the batches of the last {LAST} steps, and of the dev parts "
        f"of the two tests. Minutes are those of the steps, compilation included, on {job.machine}.\n"
    )


def versus_dense(job: Job, held: HeldOut, there: Sequence[str]) -> str:
    """Every model beside the dense one, by class."""
    rows = [
        f"## {held.name.capitalize()}\n",
        f"Here {held.about}. All sentences of a class are scored as one text, ± half of the 95 % interval; differences "
        "are to the dense model on the same sentences, with the probability that chance makes one as large.\n",
        "| model | languages | pairs of each | sentences | BLEU | chrF++ | ΔBLEU (p) | ΔchrF++ (p) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in there:
        for row in table(job.evaluation(name, held) / "classes.csv"):
            cells = [f"{row[key]:.1f} ± {row[f'{key}_95']:.1f}" for key in ("bleu", "chrf")]
            deltas = [
                "" if row[f"delta_{key}"] is None else f"{row[f'delta_{key}']:+.2f} ({row[f'p_{key}']:.3f})"
                for key in ("bleu", "chrf")
            ]
            rows.append(
                f"| {name} | {row['languages']:.0f} {row['resource']} | {row['fewest']:,.0f} to {row['most']:,.0f} "
                f"| {row['sentences']:,.0f} | {' | '.join([*cells, *deltas])} |"
            )
    found = Results.load(job.evaluation(there[0], held))
    beside = "; ".join(f"{name}: BLEU {bleu:.1f}, chrF++ {chrf:.1f}" for name, (bleu, chrf) in found.beside.items())
    return "\n".join(rows) + f"\n\nTranslators that know nothing score, {beside}. `{found.signature}`\n"


def table(path: Path) -> list[dict]:
    """The rows of a table, numbers as numbers; None for what is empty."""

    def read(value: str) -> float | str | None:
        try:
            return float(value) if value else None
        except ValueError:
            return value

    if not path.exists():  # of this test there are no sentences
        return []
    with path.open(encoding="utf-8") as file:
        return [{name: read(value) for name, value in row.items()} for row in csv.DictReader(file)]


def draw(job: Job, held: HeldOut, there: Sequence[str]) -> str:
    """The figure of a test, and its line on the page."""
    if len(there) < 2:
        return ""
    dense = Results.load(job.evaluation(DENSE, held))
    series, rows = {}, []
    for name in there[1:]:
        ours = Results.load(job.evaluation(name, held))
        deltas = {code: chrf for code, (_, chrf) in evaluate.differences(ours, [dense]).items()}
        series[name] = ours, deltas
        classes = evaluate.resource_classes(ours)
        for resource in CLASSES:
            values = np.array([deltas[code] for code in deltas if classes[code] == resource])
            if len(values) > 1:
                mean, half = figure.interval(values)
                rows.append(f"{name} {mean:+.2f} ± {half:.2f} for the {len(values)} {resource}-resource languages")
    file = job.page.with_name(f"figure6-{held.name.replace(' ', '-')}.svg")
    figure.trend(file, series, "chrF++ above the dense model", held.name)
    means = f" Means over languages: {'; '.join(rows)}." if rows else ""
    return f"![chrF++ above the dense model, languages from high to low resource]({file.name})\n{means}\n"


def versus_one_language(job: Job, there: Sequence[str]) -> str:
    """The comparison with models of one language, as far as they are there."""
    rows = []
    for held in BOTH:
        for name in (name for name in there if (job.alone_evaluation(name) / DONE).exists()):
            for row in table(job.alone_evaluation(name, held) / "scores.csv"):
                rows.append(
                    f"| {row['language']} | {row['pairs']:,.0f} | {held.name} | {name} | {row['sentences']:.0f} "
                    f"| {row['chrf++']:.1f} ± {row['chrf++_95']:.1f} | {row['chrf++'] - row['delta_chrf++']:.1f} "
                    f"| {row['delta_chrf++']:+.2f} (p = {row['p_chrf++']:.3f}) |"
                )
    if not rows:
        return ""
    head = [
        "## Against one language alone\n",
        f"Each model of one language took {job.size.alone_steps:,} steps (`{job.size.alone}`). To it, known English is "
        "as new as any: what the others gain there is what they carry over from other languages.\n",
        "| language | pairs | test | model | sentences | chrF++, 95 % | alone | ΔchrF++ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def again(job: Job, lines: Sequence[Sequence[str]]) -> str:
    """The command lines."""
    text = "\n".join(shlex.join(["m4", *line]) for line in lines)
    return f"## Doing it again\n\n```bash\n{job.asked}\n```\n\nwhich ran:\n\n```bash\n{text}\n```\n"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    try:
        run(asked())
    except SliceOverError:
        print("the time of this slice is over; the same line goes on", flush=True)
        sys.exit(AGAIN)
