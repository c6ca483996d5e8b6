"""Near twins: found whatever their length, out of the test, and told where nothing else is left."""

import itertools

import pytest
from rapidfuzz import fuzz

from gshard_m4 import prepare
from gshard_m4.corpus import hold_out
from gshard_m4.corpus.near_twins import RATIO, NearTwins
from gshard_m4.prepare_config import PrepareConfig
from gshard_m4.text import PreparedText


def test_all_near_twins_are_found_and_no_others(rng):
    """The window of lengths leaves none out."""
    keys = ["".join(rng.choice(list("ab "), size)).strip() for size in rng.integers(1, 25, 300)]
    english = NearTwins(keys[:200])
    found = [english.has(key) for key in keys[200:]]
    assert found == [any(fuzz.ratio(key, other) >= RATIO for other in keys[:200]) for key in keys[200:]]
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize(
    ("key", "twin"),
    [("group on", "group off"), ("motion sense", "motion sensor"), ("probability tonight", "probability night")],
)
def test_short_ones_have_near_twins_too(key, twin):
    """These were held out although training had the other one."""
    assert NearTwins([key, twin]).has(key, besides_itself=True)
    assert not NearTwins([key, "something else"]).has(key, besides_itself=True)
    assert NearTwins([key]).has(key), "an equal sentence in another text is a twin"


def words(rng, count, letters=9):
    return ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), letters)) for _ in range(count)]


def test_what_is_held_out_has_no_near_twin(rng):
    lone = [" ".join(words(rng, 3)) for _ in range(300)]
    twins = [f"{line} {ending}" for line in lone[:150] for ending in ("a", "b")]
    keys = [hold_out.key(line) for line in [*lone[150:], *twins]]
    parts = hold_out.parts(keys, 0.05, 0.1)
    held = [key for key, part in parts.items() if part != hold_out.TRAIN]
    assert list(parts.values()).count(hold_out.TEST) == round(0.1 * len(keys))
    assert set(held) <= set(lone[150:])
    by_quota = hold_out.parts_by_quota(keys, {"de": keys}, 10, 0.5)
    assert len(by_quota) >= 10
    assert set(by_quota) <= set(lone[150:])


PATTERN = "The {} sees the {}, and the {} is {}."
NOUNS = "dog cat bird horse mouse tree house river stone child woman man fish".split()


def sentences(count):
    """Sentences of one pattern: each has many near twins."""
    every = itertools.product(NOUNS, NOUNS, NOUNS, ("big", "small"))
    return [PATTERN.format(*chosen) for chosen in itertools.islice(every, count)]


def test_text_of_one_pattern_is_prepared_and_its_near_twins_are_told(tmp_path):
    english = sentences(3298)
    (tmp_path / "own.en").write_text("\n".join(english) + "\n", "utf-8")
    (tmp_path / "own.de").write_text("\n".join(line[::-1] for line in english) + "\n", "utf-8")
    config = PrepareConfig(
        output=tmp_path / "out", cache=tmp_path / "cache", sources=(), files=(tmp_path / "own.de",)
    )  # fmt: skip
    told = str(prepare.prepare(config, lambda line: None))
    text = PreparedText.load(tmp_path / "out")
    pairs = text.manifest["pairs"]
    assert (pairs["test"], pairs["dev"]) == (round(0.03 * 3298), round(0.015 * 3298))
    assert sum(pairs[part] for part in ("train", "dev", "test")) == 3298
    assert f"warning: {pairs['test']} English sentences of the test have a near twin in training" in told
    test = [example.english for example in text.examples()]
    assert text.near_twins(test) == [True] * pairs["test"]
    assert text.near_twins(["Something that is nowhere at all"]) == [False]
    assert text.spelt_in_bytes(text.source_ids("日本語")) > 0.5 > text.spelt_in_bytes(text.source_ids(english[0]))
