"""The page of scripts/scaling.py: packages/m4/docs/results.md and its figures, from what was measured."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from gshard_m4.significance import holm

if TYPE_CHECKING:
    from scaling import Size, Trial

    from gshard_m4.text import PreparedText

CLASSES = ("low", "medium", "high")
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7"  # told apart by the colour-blind, too
ENOUGH = 2  # seeds below which nothing is shown
FIRST = 0.25  # of the tokens; losses that the models reach before this are left out of the table


class Estimate(NamedTuple):
    """A number, and its standard deviation over the choice of English sentences."""

    size: float
    deviation: float

    @property
    def p(self) -> float:
        """The two-sided probability that chance makes a number at least as large where nothing is to be found."""
        if not self.deviation:
            return 1.0 if not self.size else 0.0
        return 2 * NormalDist().cdf(-abs(self.size) / self.deviation)

    def __str__(self) -> str:
        return f"{self.size:+.3f} ± {1.96 * self.deviation:.3f}"


class Group(NamedTuple):
    """Sentences of one language, with the factor that their mean has in a sum.

    Attributes:
        factor: of the mean.
        nats: cross entropies, or their differences, float64 [n].
        tokens: of each, int64 [n].
        english: number of the English sentence of each, int64 [n].
    """

    factor: float
    nats: np.ndarray
    tokens: np.ndarray
    english: np.ndarray


def total(groups: Sequence[Group]) -> Estimate:
    """The sum of the groups' means for a token, each with its factor.

    Sentences that share their English are not independent, so the deviation is that of sums over English sentences.

    >>> one = Group(1.0, np.array([2.0, 4.0]), np.array([1, 2]), np.array([0, 1]))
    >>> total([one])
    Estimate(size=2.0, deviation=0.0)
    >>> total([one, one._replace(factor=-1.0)]).size
    0.0
    """
    size, influence = 0.0, []
    for group in groups:
        mean = group.nats.sum() / group.tokens.sum()
        size += group.factor * mean
        influence.append(group.factor * (group.nats - mean * group.tokens) / group.tokens.sum())
    _, place = np.unique(np.concatenate([group.english for group in groups]), return_inverse=True)
    return Estimate(float(size), math.sqrt(float((np.bincount(place, np.concatenate(influence)) ** 2).sum())))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the trials of one part measured, of the seeds that have all models.

    Attributes:
        trials: model, seed -> the trial.
        found: model, seed -> what was written down of it.
        nats: model, seed -> the cross entropy of each test pair, float64 [N].
        models: in the order of the size.
        seeds: that have all models.
    """

    trials: Mapping[tuple[str, int], Trial]
    found: Mapping[tuple[str, int], dict[str, Any]]
    nats: Mapping[tuple[str, int], np.ndarray]
    models: tuple[str, ...]
    seeds: tuple[int, ...]

    @staticmethod
    def of(trials: Sequence[Trial], runs: Path, models: Sequence[str]) -> Measured:
        """Reads what is there."""
        there = {(t.model, t.seed): t for t in trials if (runs / t.folder / "result.json").exists()}
        seeds = tuple(s for s in sorted({t.seed for t in trials}) if all((m, s) in there for m in models))
        kept = {key: t for key, t in there.items() if t.seed in seeds}
        found = {key: json.loads((runs / t.folder / "result.json").read_text("utf-8")) for key, t in kept.items()}
        nats = {key: np.load(runs / t.folder / "nats.npy") for key, t in kept.items()}
        return Measured(kept, found, nats, tuple(models), seeds)

    def groups(
        self, factor: float, weights: Mapping[str, float], resource: int | None = None, seeds: Sequence[int] = ()
    ) -> list[Group]:
        """The test pairs of each language and seed, which all count alike, as groups whose sum is their mean.

        Args:
            factor: of the mean.
            weights: model -> factor of its cross entropy: 1 and -1 for a difference on the same sentences.
            resource: of the languages and seeds, only those with this size of text: its number among `CLASSES`.
            seeds: only these; all if empty.
        """
        found = []
        for seed in seeds or self.seeds:
            any_model = self.models[0], seed
            pairs = self.trials[any_model].pairs
            sizes = sorted(set(pairs.values()))
            record = self.found[any_model]
            language, tokens, english = (np.array(record[name]) for name in ("language", "tokens", "english"))
            cost = sum(weight * self.nats[model, seed] for model, weight in weights.items())
            for code in pairs:
                own = language == code
                if (resource is None or pairs[code] == sizes[resource]) and own.any():
                    found.append((cost[own], tokens[own], english[own]))
        return [Group(factor / len(found), *group) for group in found]

    def mean(self, weights: Mapping[str, float], resource: int | None = None, seeds: Sequence[int] = ()) -> Estimate:
        """The mean over languages and seeds; see `groups`."""
        return total(self.groups(1.0, weights, resource, seeds))

    def curve(self, model: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Target tokens, FLOPs and cross entropy of the dev part, where it was measured in training."""
        record = self.found[model, seed]
        step, tokens, loss = np.array(record["curve"]).T
        return tokens, step * record["flops_a_step"], loss


def reached(at: np.ndarray, losses: np.ndarray, loss: float) -> float:
    """Where a curve first has a loss, by linear interpolation; NaN where it never does.

    >>> reached(np.array([1.0, 2.0, 3.0]), np.array([4.0, 3.0, 3.5]), 3.5)
    1.5
    """
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return math.nan
    n = below[0]
    if not n:
        return float(at[0])
    share = (losses[n - 1] - loss) / (losses[n - 1] - losses[n])
    return float(at[n - 1] + share * (at[n] - at[n - 1]))


def write(
    page: Path, trials: Sequence[Trial], runs: Path, text: PreparedText, size: Size, machine: str, again: str
) -> None:
    """Writes the page and its figures from what is there.

    Args:
        page: the file; figures lie beside it.
        trials: all of the experiment.
        runs: where they lie.
        text: the corpus.
        size: of the experiment.
        machine: in words.
        again: the command line.
    """
    resources = Measured.of([t for t in trials if t.part == "resources"], runs, list(size.resources))
    depth = Measured.of([t for t in trials if t.part == "depth"], runs, list(size.depth))
    claims = [*(experts(resources) if resources.seeds else []), *(deeper(depth) if depth.seeds else [])]
    if not claims:
        print("no seed has all its models yet: no page is written", flush=True)
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    parts = [HEAD, shown(claims), setting(trials, text, size, resources, depth)]
    if resources.seeds:
        draw_resources(page.with_name("results-resources.svg"), resources)
        parts.append(of_resources(resources, size))
    if depth.seeds:
        draw_depth(page.with_name("results-depth.svg"), depth)
        parts.append(of_depth(depth))
    parts += [models(resources, depth), LIMITS, f"## Doing it again\n\nOn {machine}:\n\n```bash\n{again}\n```\n"]
    page.write_text("\n".join(parts), "utf-8")
    print(f"written: {page}", flush=True)


HEAD = """# Results

<!-- Written by scripts/scaling.py from what it measured: change that, not this. -->

This page tests two claims of the paper with small models: experts translate better with the same FLOPs a token, and
low-resource languages gain most (Figure 6); deeper models reach a loss with fewer tokens (Figure 1, Tables 2 and 3).
The measure is the cross entropy of all sentences of the test of new English ([Translating](translating.md)), in nats
a token. Every language counts alike.
"""

LIMITS = """## What this does not show

The models are thousands of times smaller than the smallest of the paper, and see millions of tokens instead of
billions. The tests are software messages, like the training text. ± and p are over the choice of English sentences;
only the columns of single seeds show what another seed changes. All models have the same learning rate, which was
chosen for models of this width and four layers.
"""


class Claim(NamedTuple):
    """A comparison: what would be true if the number is positive, the number, and that of each seed alone."""

    text: str
    value: Estimate
    seeds: tuple[float, ...]


def experts(found: Measured) -> list[Claim]:
    """Whether experts have a lower cross entropy than the dense model, and low-resource languages gain more."""
    dense, *routed = found.models
    claims = []
    for model in routed:
        gain = {dense: 1.0, model: -1.0}
        each = tuple(found.mean(gain, None, (s,)).size for s in found.seeds)
        claims.append(Claim(f"{model} is better than {dense}", found.mean(gain), each))
    for model in routed:
        gain = {dense: 1.0, model: -1.0}
        lead = total(found.groups(1.0, gain, 0) + found.groups(-1.0, gain, 2))
        each = tuple(found.mean(gain, 0, (s,)).size - found.mean(gain, 2, (s,)).size for s in found.seeds)
        claims.append(Claim(f"with {model}, low resource gains more than high", lead, each))
    return claims


def deeper(found: Measured) -> list[Claim]:
    """Whether the deepest model of each number of experts is better than the shallowest after the same tokens."""
    claims = []
    for shallow, deep in of_experts(found.models):
        gain = {shallow: 1.0, deep: -1.0}
        each = tuple(found.mean(gain, None, (s,)).size for s in found.seeds)
        claims.append(Claim(f"{deep} is better than {shallow} after the same tokens", found.mean(gain), each))
    return claims


def of_experts(models: Sequence[str]) -> list[tuple[str, str]]:
    """The shallowest and the deepest model of each number of experts.

    >>> of_experts(["8e-4l", "8e-8l", "32e-4l", "32e-8l"])
    [('8e-4l', '8e-8l'), ('32e-4l', '32e-8l')]
    """
    own: dict[str, list[str]] = {}
    for name in models:
        own.setdefault(name.partition("-")[0], []).append(name)
    return [(names[0], names[-1]) for names in own.values() if len(names) > 1]


def shown(claims: Sequence[Claim]) -> str:
    """The comparisons, with p values corrected for their number."""
    corrected = holm([claim.value.p for claim in claims])
    rows = [
        "## What is shown, and what is not", "",
        "Differences of cross entropy in nats a token, ± half of the 95 % interval; positive is better, or more. p is "
        "two-sided and corrected for the number of rows (Holm).", "",
        "| comparison | difference | p | each seed alone | shown |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for claim, p in zip(claims, corrected, strict=True):
        agree = all(math.copysign(1.0, each) == math.copysign(1.0, claim.value.size) for each in claim.seeds)
        sure = p is not None and p < 0.05 and agree and len(claim.seeds) >= ENOUGH
        answer = ("yes" if claim.value.size > 0 else "the contrary") if sure else "no"
        each = ", ".join(f"{one:+.3f}" for one in claim.seeds)
        rows.append(f"| {claim.text} | {claim.value} | {'< 0.001' if p < 0.001 else f'{p:.3f}'} | {each} | {answer} |")
    rows += ["", f'"Shown" is a corrected p below 0.05 with all seeds, {ENOUGH} or more, on the same side.', ""]
    return "\n".join(rows)


def setting(trials: Sequence[Trial], text: PreparedText, size: Size, resources: Measured, depth: Measured) -> str:
    """What was trained, on what text."""
    codes = list(trials[0].pairs)
    record = next(iter([*resources.found.values(), *depth.found.values()]))
    pairs, english = len(record["tokens"]), len(set(record["english"]))
    small, medium, large = size.pairs
    lines = [
        "## The text", "",
        f"{len(codes)} languages of [the corpus](corpus.md): {', '.join(codes)}. Sentences of training have up to "
        f"{text.length} tokens; batches have {size.tokens:,} tokens on each side; languages are drawn with a "
        f"temperature of {text.temperature:g}. Vocabularies have {text.source.size:,} and {text.target.size:,} "
        f"pieces. The test has {pairs:,} pairs, {english:,} different English sentences, without near twins in "
        "training. Sources that are longer than the model reads are cut.", "",
        f"*Resources*: each language has {small:,} training pairs with one seed, {medium:,} with another and {large:,} "
        "with the third. So each is once of low, medium and high resource, and a difference between these classes is "
        f"not one between languages. {size.steps:,} steps; the learning rate falls to zero in the last "
        f"{size.cooldown:,}. "
        f"Seeds: {len(resources.seeds)}.", "",
        f"*Depth*: each language has {large:,} pairs. {size.depth_steps:,} steps, without a lower rate at the end. "
        f"Seeds: {len(depth.seeds)}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def of_resources(found: Measured, size: Size) -> str:
    """The gains of each class."""
    dense, *routed = found.models
    rows = [
        "## Which languages gain", "",
        f"Cross entropy of {dense}, and by how much that of the others is lower, in nats a token.", "",
        f"| text of a language | {dense} | {' | '.join(routed)} |", "|---|---|" + "---|" * len(routed),
    ]  # fmt: skip
    for resource, name in [*enumerate(CLASSES), (None, "all")]:
        title = name if resource is None else f"{name}: {size.pairs[resource]:,} pairs"
        gains = [str(found.mean({dense: 1.0, model: -1.0}, resource)) for model in routed]
        rows.append(f"| {title} | {found.mean({dense: 1.0}, resource).size:.3f} | {' | '.join(gains)} |")
    return "\n".join([*rows, "", "![What experts gain, by the text of a language](results-resources.svg)", ""])


def of_depth(found: Measured) -> str:
    """Tokens and FLOPs to reach a loss, as the paper's Table 3."""
    levels = loss_levels(found)
    rows = [
        "## What depth brings", "",
        "Cross entropy of the test after all tokens; then the million target tokens, and the 10^12 FLOPs, until the "
        "dev part of new English has this cross entropy. Means over the seeds; a dash: not reached with every seed.",
        "",
        f"| model | test | {' | '.join(f'tokens to {x:.2f}' for x in levels)} | "
        f"{' | '.join(f'FLOPs to {x:.2f}' for x in levels)} |",
        "|---|---|" + "---|" * (2 * len(levels)),
    ]  # fmt: skip
    for model in found.models:
        cells = [
            f"{needed(found, model, level, of) / unit:.2f}" for of, unit in ((0, 1e6), (1, 1e12)) for level in levels
        ]
        rows.append(f"| {model} | {found.mean({model: 1.0}).size:.3f} | {' | '.join(cells)} |".replace("nan", "–"))
    rows.append("")
    for shallow, deep in of_experts(found.models):
        told = []
        for level in levels:
            tokens, flops = (needed(found, deep, level, of) / needed(found, shallow, level, of) for of in (0, 1))
            if math.isfinite(tokens):
                told.append(f"{tokens:.2f} times the tokens and {flops:.2f} times the FLOPs to {level:.2f}")
        if told:
            rows.append(f"{deep} needs {'; '.join(told)}, relative to {shallow}.")
    return "\n".join([*rows, "", "![Cross entropy against tokens and against FLOPs](results-depth.svg)", ""])


def loss_levels(found: Measured) -> list[float]:
    """Three losses that all models reach: that of the worst end, and two before it."""
    last = max(float(found.curve(m, s)[2].min()) for m in found.models for s in found.seeds)
    early = 0.0
    for model in found.models:
        for seed in found.seeds:
            tokens, _, loss = found.curve(model, seed)
            early = max(early, float(np.interp(FIRST * tokens[-1], tokens, loss)))
    lowest = math.ceil(20 * last) / 20
    return [round(lowest + share * max(early - lowest, 0.0), 2) for share in (0.5, 0.2, 0.0)]


def needed(found: Measured, model: str, loss: float, of: int) -> float:
    """The mean over seeds of the tokens (0) or FLOPs (1) until a loss; NaN where one never reaches it."""
    curves = [found.curve(model, seed) for seed in found.seeds]
    return float(np.mean([reached(curve[of], curve[2], loss) for curve in curves]))


def models(resources: Measured, depth: Measured) -> str:
    """What the models are and take."""
    rows = [
        "## The models", "",
        "| model | weights, millions | GFLOP a step | target tokens, millions | minutes of steps |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for part, name in ((resources, "resources"), (depth, "depth")):
        for model in part.models if part.seeds else ():
            own = [part.found[model, seed] for seed in part.seeds]
            tokens = np.mean([record["curve"][-1][1] for record in own]) / 1e6
            minutes = np.mean([record["seconds"] for record in own]) / 60
            weights, flops = own[0]["weights"] / 1e6, own[0]["flops_a_step"] / 1e9
            rows.append(f"| {name}: {model} | {weights:.1f} | {flops:.1f} | {tokens:.2f} | {minutes:.0f} |")
    return "\n".join([*rows, "", "FLOPs are gshard's own count of a step, backward pass and optimizer included.", ""])


def draw_resources(path: Path, found: Measured) -> None:
    """Draws what each class gains from experts, with 95 % intervals."""
    dense, *routed = found.models
    with mpl.rc_context({"svg.hashsalt": "m4", "font.size": 9}):
        drawing = Figure(figsize=(6.0, 3.2), layout="constrained")
        axes = drawing.subplots()
        for n, model in enumerate(routed):
            gains = [found.mean({dense: 1.0, model: -1.0}, resource) for resource in range(len(CLASSES))]
            at = np.arange(len(CLASSES)) + 0.1 * (n - (len(routed) - 1) / 2)
            halves = [1.96 * gain.deviation for gain in gains]
            axes.errorbar(at, [gain.size for gain in gains], halves, fmt="o", capsize=3, color=COLOURS[n], label=model)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xticks(range(len(CLASSES)), [f"{name} resource" for name in CLASSES])
        axes.set_ylabel(f"nats a token below {dense}")
        _finish(drawing, path)


def draw_depth(path: Path, found: Measured) -> None:
    """Draws the cross entropy of the dev part against tokens and FLOPs, the mean over seeds."""
    with mpl.rc_context({"svg.hashsalt": "m4", "font.size": 9}):
        drawing = Figure(figsize=(8.0, 3.2), layout="constrained")
        panels = zip(drawing.subplots(1, 2, sharey=True), (1e6, 1e12), ("million target tokens", "10^12 FLOPs"))
        for of, (axes, unit, title) in enumerate(panels):
            for n, model in enumerate(found.models):
                curves = np.mean([found.curve(model, seed) for seed in found.seeds], axis=0)
                axes.plot(curves[of] / unit, curves[2], color=COLOURS[n % len(COLOURS)], label=model)
            axes.set_xlabel(title)
        drawing.axes[0].set_ylabel("nats a token, dev part of new English")
        _finish(drawing, path)


def _finish(drawing: Figure, path: Path) -> None:
    for axes in drawing.axes:
        axes.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    drawing.savefig(path, metadata={"Date": None})
