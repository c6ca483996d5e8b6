"""scripts/scaling.py: equal FLOPs, languages that each have each size of text, clustered estimates, resuming."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gshard_m4.encoded import Encoded

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import scaling
import scaling_page
from scaling import DENSE, GROUPS, SIZES, Trial, some_pairs
from scaling_page import Claim, Estimate, Group, Measured, shown, total


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_models_differ_in_experts_and_in_nothing_else_that_takes_flops(size):
    dense = size.resources[DENSE].transformer(100, 100)
    for name, choice in size.resources.items():
        found = choice.transformer(100, 100)
        assert found.experts == (0 if name == DENSE else int(name.removeprefix("moe-")))
        if name != DENSE:  # two experts for a token in every other layer
            assert 2 * dense.hidden_dim == 3 * found.hidden_dim
            alike = {"experts": 0, "hidden_dim": dense.hidden_dim, "groups": dense.groups}
            assert dataclasses.replace(found, **alike) == dense


def encoded(of):
    language = np.repeat(np.arange(len(of)), list(of.values())).astype(np.uint16)
    at = np.arange(len(language) + 1)
    ids = np.full(len(language), 5)
    return Encoded(tuple(of), language, ids, ids, at, at)


def test_a_smaller_text_is_part_of_a_larger_one():
    data = encoded({"de": 30, "fr": 20})
    small, large = (set(some_pairs(data, 8, {"fr": count})) for count in (5, 15))
    assert (len(small), len(large)) == (5, 15)
    assert small < large <= set(range(30, 50))


def test_too_little_text_is_refused_with_what_there_is():
    size = SIZES["smallest"]
    with pytest.raises(SystemExit, match=r"3 languages with 40 training pairs .* the corpus has 1: de 90, fr 20"):
        scaling.most_text(encoded({"fr": 20, "de": 90}), 8, size)


def test_pairs_of_an_english_sentence_are_drawn_together():
    rng = np.random.default_rng(0)
    nats, tokens, english = rng.normal(size=600), rng.integers(3, 9, 600), rng.integers(0, 60, 600)
    whole = Group(1.0, nats, tokens, english)
    clusters = [np.flatnonzero(english == n) for n in range(60)]
    drawn = []
    for _ in range(2000):
        rows = np.concatenate([clusters[n] for n in rng.integers(0, 60, 60)])
        drawn.append(nats[rows].sum() / tokens[rows].sum())
    assert total([whole]).deviation == pytest.approx(np.std(drawn), rel=0.1)
    twice = total([whole._replace(factor=0.5), whole._replace(factor=0.5)])  # the same pairs again tell nothing new
    assert twice.deviation == pytest.approx(total([whole]).deviation)


def test_what_one_seed_contradicts_is_not_shown():
    clear = Claim("a", Estimate(0.5, 0.01), (0.5, 0.4, 0.6))
    split = Claim("b", Estimate(0.5, 0.01), (1.2, -0.1, 0.4))
    worse = Claim("c", Estimate(-0.5, 0.01), (-0.5, -0.4))
    weak = Claim("d", Estimate(0.02, 0.012), (0.02, 0.02))  # p = 0.096 before the correction
    once = Claim("e", Estimate(0.5, 0.01), (0.5,))
    rows = [row.split("|") for row in shown([clear, split, worse, weak, once]).splitlines() if row.startswith("| ")]
    assert [row[-2].strip() for row in rows[1:]] == ["yes", "no", "the contrary", "no", "no"]


def measured(tmp_path, gains):
    """Results of made-up models: the one of experts is better by so much for a language with so many pairs."""
    languages, every = ["x", "y", "z"], []
    english = [n for n in range(50) for _ in languages]
    for seed, model in itertools.product(range(GROUPS), (DENSE, "moe-8")):
        pairs = {code: (10, 20, 40)[(at + seed) % GROUPS] for at, code in enumerate(languages)}
        trial = Trial("resources", model, seed, pairs)
        every.append(trial)
        folder = tmp_path / trial.folder
        folder.mkdir()
        better = [gains[pairs[code]] if model != DENSE else 0.0 for _ in range(50) for code in languages]
        np.save(folder / "nats.npy", 4 * (3.0 - np.array(better)) + 0.1 * np.sin(english))
        said = {"english": english, "tokens": [4] * len(english), "language": languages * 50, "curve": [[1, 2.0, 3.0]]}
        (folder / "result.json").write_text(json.dumps(said))
    return Measured.of(every, tmp_path, [DENSE, "moe-8"])


def test_gains_belong_to_the_size_of_the_text(tmp_path):
    found = measured(tmp_path, {10: 0.3, 20: 0.2, 40: 0.1})
    gain = {DENSE: 1.0, "moe-8": -1.0}
    assert [round(found.mean(gain, resource).size, 9) for resource in range(3)] == [0.3, 0.2, 0.1]
    better, lead = scaling_page.experts(found)
    assert (better.value.size, lead.value.size) == (pytest.approx(0.2), pytest.approx(0.2))
    assert lead.seeds == pytest.approx((0.2, 0.2, 0.2))
