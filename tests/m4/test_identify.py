"""Telling languages apart by the pieces of their text."""

from __future__ import annotations

import numpy as np

from gshard_m4.encoded import Encoded
from gshard_m4.identify import learn
from gshard_m4.language_names import code_of, name_of


def corpus(rng: np.random.Generator, pairs: int = 300) -> tuple[Encoded, np.ndarray]:
    """Three languages of 40 pieces; the first two have half of their pieces in common."""
    share_LV = np.full((3, 40), 1e-3)
    share_LV[0, :20] += 1
    share_LV[1, 10:30] += 1
    share_LV[2, 30:] += 1
    share_LV /= share_LV.sum(1, keepdims=True)
    language = np.sort(rng.integers(0, 3, pairs)).astype(np.uint16)[rng.permutation(pairs)]
    lengths = rng.integers(1, 9, pairs)
    source = np.concatenate([rng.choice(40, n, p=share_LV[at]) for n, at in zip(lengths, language, strict=True)])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return Encoded(("de", "nl", "ja"), language, source, source, ends, ends), share_LV


def test_languages_are_told_apart_and_doubt_is_told(rng: np.random.Generator) -> None:
    data, share_LV = corpus(rng)
    found = learn(data, 42)
    assert found.log_LV.shape == (3, 42)
    assert np.isfinite(found.log_LV).all(), "a piece that no text had decides nothing"
    right = wrong = 0
    for _ in range(300):
        at = int(rng.integers(0, 3))
        said = found.of(rng.choice(40, 8, p=share_LV[at]).tolist())
        right, wrong = right + (said == data.languages[at]), wrong + (said not in (None, data.languages[at]))
    assert right > 250
    assert wrong < 5
    assert found.of([12, 15, 18, 11]) is None, "both have these"
    assert found.of([35, 36]) is None, "too little"
    assert found.of([40, 41, 41, 40]) is None, "nobody has these"
    assert found.of([]) is None


def test_names() -> None:
    assert [name_of(code) for code in ("dsb", "gsw", "hsb", "io", "kab", "os", "tet", "udm")] == [
        "Lower Sorbian", "Swiss German", "Upper Sorbian", "Ido", "Kabyle", "Ossetian", "Tetum", "Udmurt",
    ]  # fmt: skip
    assert code_of(" lower sorbian ") == "dsb"
    assert code_of("") is None
