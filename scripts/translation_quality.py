"""Trains and scores translation models within a budget of minutes, and writes docs/results.md.

    python scripts/translation_quality.py --data data/base --minutes 20 --bilingual-minutes 5 --machine "two CPU cores"

Four things are compared on the same held-out sentences: a Mixture-of-Experts model, a dense one with as many FLOPs
for a token that takes as many steps, and, for some languages, models of that language alone. Every one of them is
trained and scored by the command line of `m4`, and the page has all of these lines.

What is done is not done again: a model goes on from its checkpoint until it has had its minutes, a score is read from
its file. So a run that is stopped goes on where it was when the same line is given again.
"""

import argparse
import csv
import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from m4 import checkpoint, evaluate
from m4.evaluate import CLASSES, SURE, Results

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
INDEX = ROOT / "docs" / "index.md"
M4 = [sys.executable, "-m", "m4"]
STOPPED = 143
MOE, DENSE = "moe", "dense"
LAST = 500  # steps whose training loss is told
# Of --learning-rate 0.1, 0.2, 0.4, 1 and 2.5, after 500 steps of moe-8e-4l, 0.4 is the best.
TRAINING = "--learning-rate 0.4 --warmup-steps 100 --peak-step 400 --dropout 0"


@dataclasses.dataclass(frozen=True)
class Budget:
    """What was asked for on the command line."""

    data: Path
    runs: Path
    minutes: float
    steps: int | None
    bilingual_minutes: float
    languages: tuple[str, ...]
    sentences: int
    tokens: int
    preset: str
    dense_preset: str
    bilingual_preset: str
    training: tuple[str, ...]
    beam: int
    machine: str
    page: Path

    def evaluation(self, name: str) -> Path:
        """Where the scores of a run are."""
        return self.runs / name / "evaluation"


def asked() -> Budget:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that m4 prepare made")
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"), help="where models and scores are kept")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training steps, for the MoE model")
    parser.add_argument("--steps", type=int, help="steps of the MoE and the dense model, instead of minutes")
    parser.add_argument("--bilingual-minutes", type=float, default=5.0, help="of training steps for each; 0 for none")
    parser.add_argument("--languages", nargs="*", default=[], help="of the bilingual models; by default five by size")
    parser.add_argument("--sentences", type=int, default=2000, help="that are scored, of all languages together")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--preset", default="moe-8e-4l")
    parser.add_argument("--dense-preset", default="dense-4l-wide", help="of as many FLOPs")
    parser.add_argument("--bilingual-preset", default="bilingual-4l")
    parser.add_argument("--training", default=TRAINING, help="options of m4 train")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--machine", default="not said", help="in words, for the page")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    fields = vars(given) | {"languages": tuple(given.languages), "training": tuple(shlex.split(given.training))}
    if not fields["languages"]:
        fields["languages"] = five(manifest(given.data)["languages"])
    return Budget(**fields)


def manifest(data: Path) -> dict:
    """What m4 prepare wrote down."""
    return json.loads((data / "manifest.json").read_text("utf-8"))


def five(languages: Mapping[str, int]) -> tuple[str, ...]:
    """Two languages of the most text, one of the middle and two of the least, but for the very ends."""
    ordered = sorted(languages, key=lambda name: -languages[name])
    if len(ordered) <= 5:
        return tuple(ordered)
    last = len(ordered) - 1
    return tuple(ordered[round(last * share)] for share in (0.03, 0.12, 0.5, 0.88, 0.97))


def records(run: Path) -> list[dict]:
    """The metrics of a run, a record for each step."""
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def train(budget: Budget, name: str, preset: str, extra: Sequence[str], minutes: float | None, steps: int) -> list[str]:
    """Trains until the run has had so many minutes of steps, or has taken so many steps; gives the command line."""
    run = budget.runs / name
    line = ["train", "--data", str(budget.data), "--run", str(run), "--preset", preset, "--devices", "1"]
    line += ["--tokens", str(budget.tokens), "--save-every", "200", *budget.training, *extra]
    done = run / "trained.json"
    if done.exists():
        return line + ["--steps", str(json.loads(done.read_text())["steps"])]
    full = line + ["--steps", str(steps), "--resume"]

    def enough() -> bool:
        return minutes is not None and sum(r["seconds"] for r in records(run)) >= 60 * minutes

    if not enough():
        print(f"$ m4 {shlex.join(full)}", flush=True)
        process = subprocess.Popen([*M4, *full])
        try:
            while process.poll() is None and not enough():
                time.sleep(2)
        finally:  # also when this script is stopped: it saves
            process.terminate()
            process.wait()
        if process.returncode not in ((0, STOPPED) if enough() else (0,)):
            sys.exit(f"training of {name} ended with {process.returncode}")
    taken = len(records(run))
    done.write_text(json.dumps({"steps": taken}))
    return line + ["--steps", str(taken)]


def score(budget: Budget, name: str, sentences: int, output: Path, extra: Sequence[str] = ()) -> list[str]:
    """Scores a run; gives the command line."""
    line = ["evaluate", "--data", str(budget.data), "--run", str(budget.runs / name), "--sentences", str(sentences)]
    line += ["--beam", str(budget.beam), "--output", str(output), *extra]
    if not (output / evaluate.RESULTS).exists() or not (output / "log.txt").exists():
        print(f"$ m4 {shlex.join(line)}", flush=True)
        told = subprocess.run([*M4, *line], capture_output=True, text=True)
        print(told.stdout, told.stderr, flush=True)
        if told.returncode:
            sys.exit(f"scoring of {name} ended with {told.returncode}")
        (output / "log.txt").write_text(told.stdout)
    return line


def run(budget: Budget) -> None:
    """Trains and scores everything, and writes the page after each model."""
    lines = [train(budget, MOE, budget.preset, [], None if budget.steps else budget.minutes, budget.steps or 10**6)]
    steps = len(records(budget.runs / MOE))
    lines.append(train(budget, DENSE, budget.dense_preset, [], None, steps))
    lines.append(score(budget, DENSE, budget.sentences, budget.evaluation(DENSE)))
    lines.append(
        score(budget, MOE, budget.sentences, budget.evaluation(MOE), ["--baselines", str(budget.evaluation(DENSE))])
    )
    write(budget, lines)
    if not budget.bilingual_minutes:
        return
    # As many sentences of each as in the comparison of all languages, and not too few for a score.
    each = max(budget.sentences // len(manifest(budget.data)["languages"]), 100)
    for code in budget.languages:
        name = f"only-{code}"
        lines.append(
            train(budget, name, budget.bilingual_preset, ["--languages", code], budget.bilingual_minutes, 10**6)
        )
        lines.append(score(budget, name, each, budget.evaluation(name)))
        versus = ["--languages", code, "--baselines", str(budget.evaluation(name))]
        lines.append(score(budget, MOE, each, budget.runs / MOE / f"evaluation-{code}", versus))
        write(budget, lines)


def write(budget: Budget, lines: Sequence[Sequence[str]]) -> None:
    """Writes the page from what is there."""
    parts = [HEAD.format(machine=budget.machine), corpus(budget), models(budget), by_class(budget)]
    parts += [bilingual(budget), nothing(budget), again(budget, lines)]
    budget.page.write_text("\n".join(filter(None, parts)), "utf-8")
    if budget.page == PAGE and "\nresults\n" not in INDEX.read_text("utf-8"):
        INDEX.write_text(INDEX.read_text("utf-8").replace("\ntranslating\n", "\ntranslating\nresults\n"), "utf-8")
    print(f"written: {budget.page}", flush=True)


HEAD = """# Results

<!-- Written by scripts/translation_quality.py from what it measured: change that, not this. -->

How well do models translate that were trained for some minutes on {machine}? Badly: the paper's models had 22 TPU v3
core-years and 25 billion pairs. What can be seen at this size is how a Mixture-of-Experts model compares with a dense
one of the same FLOPs after the same steps, and with models of one language, on sentences that neither has seen. Each
model was trained once, with the seed 0.
"""


def corpus(budget: Budget) -> str:
    """What was trained on."""
    m = manifest(budget.data)
    return f"""## The text

The tier `{m["settings"]["tier"]}` of [the corpus](corpus.md): {m["pairs"]["train"]:,} training pairs in
{len(m["languages"])} languages, drawn with a temperature of {m["settings"]["temperature"]:g}; vocabularies of
{m["source_vocabulary"]:,} and {m["target_vocabulary"]:,} pieces. Batches of {budget.tokens:,} tokens on each side. No
English sentence of the test is in training. Nobody is told the language of a sentence when it is scored.
"""


def models(budget: Budget) -> str:
    """A row for each model that has been scored."""
    rows = [
        "## The models\n",
        "| model | preset | weights | steps | target tokens | minutes of steps | cross entropy, training | held-out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = [MOE, DENSE, *(f"only-{code}" for code in budget.languages)]
    presets = [budget.preset, budget.dense_preset, *([budget.bilingual_preset] * len(budget.languages))]
    for name, preset in zip(names, presets, strict=True):
        taken = records(budget.runs / name)
        if not taken or not (budget.evaluation(name) / "log.txt").exists():
            continue
        log = (budget.evaluation(name) / "log.txt").read_text()
        entropy = re.search(r"held-out cross entropy: ([\d.]+)", log)
        tokens, seconds = (sum(r[key] for r in taken) for key in ("tokens", "seconds"))
        trained = np.mean([r["cross_entropy"] for r in taken[-LAST:]])
        million = weights(budget.runs / name) / 1e6
        rows.append(
            f"| {name} | `{preset}` | {million:.1f} M | {len(taken):,} | {tokens / 1e6:.2f} M "
            f"| {seconds / 60:.1f} | {trained:.3f} | {entropy.group(1) if entropy else ''} |"
        )
    rows.append(
        f"\nCross entropy is in nats for each token: of the batches of the last {LAST} steps, and of held-out "
        "sentences of the languages of the model, whose English is in no training pair. A model that is lower on the "
        "first and not on the second knows more English by heart. Minutes are those of the steps, the compilation of "
        f"the first included, on {budget.machine}.\n"
    )
    return "\n".join(rows)


def weights(run: Path) -> int:
    """Number of weights of a run's newest checkpoint."""
    _, state, _ = checkpoint.restore(run / "checkpoints", checkpoint.steps(run / "checkpoints")[-1])
    return sum(leaf.size for leaf in jax.tree.leaves(state["params"]))


def by_class(budget: Budget) -> str:
    """The comparison with the dense model."""
    ours, dense = (Results.load(budget.evaluation(name)) for name in (MOE, DENSE))
    deltas = evaluate.differences(ours, [dense])
    classes = evaluate.resource_classes(ours)
    p = {row["language"]: float(row["p_bleu"]) for row in table(budget.evaluation(MOE))}
    rows = [
        "## Mixture of experts against dense\n",
        "Means over the languages of a class, by training pairs: the quarter with the most, the half between, the "
        "quarter with the fewest.\n",
        f"| languages | pairs of each | BLEU | dense | ΔBLEU | chrF++ | dense | ΔchrF++ | better, worse (p < {SURE}) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (*CLASSES, "all"):
        codes = [code for code in ours.languages if name in ("all", classes[code])]
        pairs = [ours.languages[code].pairs for code in codes]
        mine, theirs = ([r.languages[c] for c in codes] for r in (ours, dense))
        bleu, chrf = (np.mean([getattr(of, key) for of in mine]) for key in ("bleu", "chrf"))
        their_bleu, their_chrf = (np.mean([getattr(of, key) for of in theirs]) for key in ("bleu", "chrf"))
        surely = [deltas[c][0] for c in codes if p[c] < SURE]
        rows.append(
            f"| {len(codes)} {name} | {min(pairs):,} to {max(pairs):,} | {bleu:.2f} | {their_bleu:.2f} "
            f"| {bleu - their_bleu:+.2f} | {chrf:.2f} | {their_chrf:.2f} | {chrf - their_chrf:+.2f} "
            f"| {sum(d > 0 for d in surely)}, {sum(d < 0 for d in surely)} |"
        )
    sentences = sum(of.sentences for of in ours.languages.values())
    rows.append(
        f"\nAll {sentences:,} sentences together: BLEU {ours.overall[0]:.2f} and chrF++ {ours.overall[1]:.2f}, dense "
        f"{dense.overall[0]:.2f} and {dense.overall[1]:.2f}. Of {len(codes)} languages compared at {SURE}, "
        f"{SURE * len(codes):.0f} would differ by chance. Signature: `{ours.signature}`.\n"
    )
    return "\n".join(rows)


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of an evaluation."""
    with (folder / "scores.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bilingual(budget: Budget) -> str:
    """The comparison with models of one language, as far as they are there."""
    found = []
    for code in budget.languages:
        mine, only = budget.runs / MOE / f"evaluation-{code}", budget.evaluation(f"only-{code}")
        if not ((mine / "log.txt").exists() and (only / "log.txt").exists()):
            continue
        ours, theirs = Results.load(mine).languages[code], Results.load(only).languages[code]
        (row,) = table(mine)
        found.append(
            f"| {code} | {ours.pairs:,} | {ours.sentences} | {ours.bleu:.2f} ± {row['bleu_95']} | {theirs.bleu:.2f} "
            f"| {ours.bleu - theirs.bleu:+.2f} (p = {float(row['p_bleu']):.3f}) | {ours.chrf:.2f} | {theirs.chrf:.2f} |"
        )
    if not found:
        return ""
    return "\n".join(
        [
            "## Against one language alone\n",
            f"Each model of one language had {budget.bilingual_minutes:g} minutes of steps for itself.\n",
            "| language | pairs | sentences | BLEU, 95 % | alone | ΔBLEU | chrF++ | alone |",
            "|---|---|---|---|---|---|---|---|",
            *found,
            "",
        ]
    )


def nothing(budget: Budget) -> str:
    """What translators score that know nothing."""
    log = (budget.evaluation(MOE) / "log.txt").read_text()
    head, last = "", ""
    for line in log.splitlines():
        if line.startswith("language"):
            head = line
        elif line.startswith("all ") and "copy the source" in head and not last:
            last = line
    values = last.split()[2:]
    if len(values) != 6:
        return ""
    return (
        f"Copying the source scores BLEU {values[2]} and chrF++ {values[3]} on the same sentences, the most frequent "
        f"sentence of the training text {values[4]} and {values[5]}.\n"
    )


def again(budget: Budget, lines: Sequence[Sequence[str]]) -> str:
    """The command lines."""
    text = "\n".join(shlex.join(["m4", *line]) for line in lines)
    here = shlex.join(["python", "scripts/translation_quality.py", *sys.argv[1:]])
    return f"## Doing it again\n\n```bash\n{here}\n```\n\nwhich ran:\n\n```bash\n{text}\n```\n"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    run(asked())
