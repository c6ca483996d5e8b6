"""What scripts/figure6_ablation.py measures: cross entropies of sentences, how sure their differences are, its page."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from gshard import moe
from gshard_m4 import checkpoint
from gshard_m4.batches import Batches, Shape, in_order
from gshard_m4.config import Run
from gshard_m4.encoded import Encoded
from gshard_m4.step import held_out_cross_entropy, make_evaluation

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from figure6_ablation_page import headline, verdict, write
from figure6_compared import KNOWN, NEW, TRAINING, Ablation
from figure6_job import DENSE, SIZES, Job
from figure6_losses import Estimate, Found, Group, Sentences, classes_of, english_drawn, exposure, nats, times_drawn
from figure6_losses import total as total_of
from figure6_losses import training_pairs as picked

LANGUAGES = tuple(f"l{number}" for number in range(8))
FIRST, NATURAL = 5.0, 1.0


def pairs_of(rng: np.random.Generator, count: int, english: int = 40, longest: int = 7) -> Encoded:
    """Random pairs of eight languages, the first ones the larger; many have the same English."""
    sentences = [rng.integers(3, 20, rng.integers(1, longest)) for _ in range(english)]
    language = np.sort((len(LANGUAGES) * rng.random(count) ** 2).astype(int))
    target = [sentences[i] for i in rng.integers(0, english, count)]
    source = [rng.integers(3, 20, rng.integers(1, longest)) for _ in range(count)]
    at = [np.concatenate([[0], np.cumsum([len(own) for own in side])]) for side in (source, target)]
    return Encoded(LANGUAGES, language, np.concatenate(source), np.concatenate(target), *at)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_sentences_cost_together_what_the_evaluation_says(
    experts: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = moe.TransformerConfig(
        20, 20, model_dim=8, hidden_dim=16, heads=2, head_dim=4, encoder_layers=2, decoder_layers=2, experts=experts,
        group_size=None, groups=1 if experts else None, dropout=0.2,
    )  # fmt: skip
    params = moe.init(model, jax.random.key(0))
    checkpoint.save(Run(tmp_path).checkpoints, 1, {"params": params}, {"model": dataclasses.asdict(model)})
    sentences, shape = Sentences(pairs_of(rng, 50)), Shape(4, 16, 8)
    cost = nats(Run(tmp_path), shape, sentences)
    assert (cost > 0).all()
    evaluate = jax.jit(make_evaluation(model))
    whole = held_out_cross_entropy(evaluate, params, in_order(sentences.data, shape, 8))
    assert cost.sum() / sentences.tokens.sum() == pytest.approx(whole, rel=1e-5)
    if not experts:  # a sentence costs what it does alone; experts may be full
        for one in (0, 17, 49):
            alone = in_order(sentences.data.only([one]), shape, 8)
            mean = held_out_cross_entropy(evaluate, params, alone)
            assert cost[one] / sentences.tokens[one] == pytest.approx(mean, rel=1e-5)


def test_draws_are_counted_and_pairs_picked_alike_of_each_language(rng: np.random.Generator) -> None:
    data = pairs_of(rng, 4000, longest=12)
    batches = Batches(data, tokens=96, length=9, temperature=FIRST, seed=3)
    count = times_drawn(batches, 20)
    ends = sum(int((batches.batch(step)["target"] == 1).sum()) for step in range(20))
    assert count.sum() == ends
    assert not count[data.lengths > 9].any()
    some = picked(batches, 30)
    assert [int(some.of(code).sum()) for code in LANGUAGES] == [30] * 8
    np.testing.assert_array_equal(some.data.source, data.only(some.rows).source)
    assert (data.lengths[some.rows] <= 9).all()
    assert (np.diff(some.data.language) != 0).sum() > 100, "languages are mixed"

    classes = classes_of({code: 800 - i for i, code in enumerate(LANGUAGES)})
    english = english_drawn(data, count)
    exposures = exposure(batches, count, english, classes)
    fits = data.lengths <= 9
    assert exposures["all"].times == pytest.approx(count[fits].mean())
    assert exposures["low"].times > exposures["high"].times, "rare ones come back more often"
    assert exposures["all"].share == pytest.approx(1)
    assert sum(exposures[name].share for name in ("high", "medium", "low")) == pytest.approx(1)
    same = Sentences(data).english
    by_hand = np.array([count[same == number].sum() for number in same])
    np.testing.assert_array_equal(english, by_hand)
    assert exposures["all"].english == pytest.approx(by_hand[fits].mean())


def test_deviations_are_those_of_other_choices_of_english(rng: np.random.Generator) -> None:
    """Against sums over English sentences that are drawn anew, with replacement."""
    english = np.repeat(np.arange(300), 4)
    tokens = rng.integers(2, 9, 1200)
    of_english = rng.normal(0.3, 0.5, 300)[english]
    cost = tokens * (of_english + rng.normal(0, 0.4, 1200))
    halves = [(1.0, english % 2 == 0), (-1.0, english % 3 == 0)]
    found = total_of([Group(factor, cost[own], tokens[own], english[own]) for factor, own in halves])
    assert found is not None
    sizes = []
    for _ in range(2000):
        times = np.bincount(rng.integers(0, 300, 300), minlength=300)[english]
        sizes.append(sum(f * (cost * times)[own].sum() / (tokens * times)[own].sum() for f, own in halves))
    assert found.deviation == pytest.approx(np.std(sizes), rel=0.1)
    assert abs(found.size - np.mean(sizes)) < 0.2 * found.deviation
    assert total_of([]) is None


def test_a_p_is_that_of_both_sides() -> None:
    assert Estimate(1.96, 1.0).p == pytest.approx(0.05, abs=1e-3)
    assert Estimate(-1.96, 1.0).p == pytest.approx(0.05, abs=1e-3)
    assert Estimate(0.0, 0.0).p == 1.0


def found_with(rng: np.random.Generator, by_heart: float, leads: dict[float, float]) -> Found:
    """Losses of 100 sentences of each language, a dense model's and one's that is better by known amounts.

    Args:
        by_heart: what experts gain besides on pairs that were drawn, where a pair of low resource was drawn often.
        leads: temperature -> what low resource gains above high resource on new text.
    """
    sets, losses, drawn = {}, {}, {}
    classes = classes_of({code: 900 - i for i, code in enumerate(LANGUAGES)})
    for name in (TRAINING, KNOWN, NEW):
        data = pairs_of(rng, 4000, english=900)
        data = Encoded(LANGUAGES, np.arange(4000) % 8, data.source, data.target, data.source_at, data.target_at)
        sets[name] = Sentences(data, np.arange(4000) if name == TRAINING else None)
    low = np.array([classes[LANGUAGES[number]] == "low" for number in range(8)])
    for temperature, lead in leads.items():
        drawn[temperature] = rng.poisson(np.where(low, 1.5 if temperature > 1 else 0.4, 0.4)[np.arange(4000) % 8])
        for name, sentences in sets.items():
            tokens, of_low = sentences.tokens, low[np.asarray(sentences.data.language)]
            dense = tokens * (3 + rng.normal(0, 0.5, 4000))
            gain = 0.1 + rng.normal(0, 0.1, 4000) + np.where(of_low, lead, 0.0)
            if name == TRAINING:
                gain += np.where(of_low & (drawn[temperature] > 0), by_heart if temperature > 1 else 0.0, 0.0)
            losses[temperature, DENSE, name], losses[temperature, "moe-32", name] = dense, dense - tokens * gain
    batches = Batches(sets[TRAINING].data, tokens=96, length=9, temperature=FIRST, seed=3)
    english = {t: english_drawn(batches.data, n) for t, n in drawn.items()}
    count = {t: exposure(batches, n, english[t], classes) for t, n in drawn.items()}
    pairs = {code: 900 - i for i, code in enumerate(LANGUAGES)}
    return Found(sets, classes, pairs, drawn, english, count, losses)


@pytest.mark.parametrize(
    ("by_heart", "leads", "told"),
    [
        (
            0.0, {FIRST: 0.1, NATURAL: 0.1},
            ("gain most is shown on training pairs that were never drawn, known English and new English",),
        ),
        (
            0.1, {FIRST: 0.0, NATURAL: 0.1},
            ("gain most is not shown on training pairs that were never drawn, known", "what they lack is shown.",
             "gain neither more nor less", "by heart more than the dense model does is shown.",
             "larger than with 5 on known English and new English."),
        ),
        (
            0.1, {FIRST: 0.0, NATURAL: -0.1},
            ("what they lack is not shown", "is shown. With", "others, they gain less", "on neither test"),
        ),
        (0.0, {FIRST: -0.1, NATURAL: 0.0}, ("languages gain less", "does is not shown. With", "with 5 on known")),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_numbers(
    by_heart: float, leads: dict[float, float], told: tuple[str, ...], rng: np.random.Generator
) -> None:
    of = Ablation(found_with(rng, by_heart, leads))
    said = f"{headline(of)} {verdict(of)}"
    assert said.startswith("moe-32 has a lower cross entropy than the dense model on known English and new English;")
    for words in told:
        assert words in said
    for name in (KNOWN, NEW):  # the same sentences
        change, low = of.change(name, "all"), of.change(name, "low")
        assert change is not None
        assert low is not None
        assert low.size == pytest.approx(leads[NATURAL] - leads[FIRST], abs=3 * low.deviation + 1e-9)
        assert change.size == pytest.approx(0.25 * low.size, abs=3 * change.deviation + 3 * low.deviation)


def test_the_page_has_what_was_planted(tmp_path: Path, rng: np.random.Generator) -> None:
    found = found_with(rng, 0.1, {FIRST: 0.02, NATURAL: 0.08})
    settings = {"tier": "base", "temperature": FIRST, "length": 32}
    said = {"languages": dict(found.pairs), "pairs": {"train": 4000}, "settings": settings}
    (tmp_path / "manifest.json").write_text(json.dumps(said))
    for temperature in (5, 1):
        run = tmp_path / f"temperature-{temperature}" / DENSE
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(json.dumps({"tokens": 1.5e6}) + "\n")
    page = tmp_path / "docs" / "page.md"
    job = Job(tmp_path, tmp_path, SIZES["narrow"], 80, 8, (), (), "a try", page, math.inf, "again")
    write(job, found, [["train"]])
    text = page.read_text("utf-8")
    row = re.search(r"\| 5 \| 2 low \| ([+-][\d.]+) ± [\d.]+ \| (\S+) ± \S+ \| (\S+) ± \S+ \(p < 0.001\)", text)
    assert row is not None
    dense, experts, more = map(float, row.groups())
    assert more == pytest.approx(0.1, abs=0.03)
    assert experts - dense == pytest.approx(more, abs=2e-3)
    lead = re.search(r"\| 1 less 5 \| new English \|  \|  \| (\S+) ± \S+ \(p [<=] \S+\)", text)
    assert lead is not None
    assert float(lead[1]) == pytest.approx(0.06, abs=0.03)
    assert "1.50 M target tokens with a temperature of 5" in text
    assert f"**{headline(Ablation(found))}**\n\n{verdict(Ablation(found))}" in text
