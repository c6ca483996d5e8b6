"""From a user's file to batches: complete or not at all, deterministic, and clear about what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from m4.batches import EOS, Batches, Encoded, in_order, shapes
from m4.corpus import fetch, hold_out
from m4.corpus.source import Source
from m4.errors import CorpusError, VocabularyError
from m4.prepare import PrepareConfig, open_text, prepare
from m4.text import PreparedText
from m4.tokens import Vocabulary, learn

NOUNS = "house river stone bridge window garden letter doctor market winter summer candle forest island engine".split()
VERBS = "opens closes finds loses paints burns carries follows hides breaks mends washes sells counts draws".split()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PrepareConfig:
    folder = tmp_path_factory.mktemp("corpus")
    lines = []
    for i, noun in enumerate(NOUNS):
        for j, verb in enumerate(VERBS):
            for k, other in enumerate(NOUNS[: 1 + (i + j) % 6]):
                english = f"the {noun} {verb} every {other}" + " again" * (k % 3)
                lines.append(f"de\tder {noun[::-1]} {verb[::-1]} jeden {other[::-1]}\t{english}")
                if (i + j + k) % 4 == 0:
                    lines.append(f"fr\tle {noun.upper()}x {verb[1:]}ot chaque {other[2:]}ez\t{english}")
    lines.append("a bad line")
    file = folder / "mine.tsv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return PrepareConfig(
        output=folder / "ready", cache=folder / "cache", sources=(), files=(file,), source_vocabulary=350,
        target_vocabulary=310, tokens=1152, length=72, dev=0.1, test=0.1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def text(config: PrepareConfig) -> PreparedText:
    done = prepare(config)
    assert not done.was_there
    assert "1 lines rejected" in str(done)
    return open_text(config.output)


def test_nothing_is_done_twice(config: PrepareConfig, text: PreparedText) -> None:
    stamp = (config.output / "train.npz").stat().st_mtime_ns
    assert prepare(config).was_there
    assert (config.output / "train.npz").stat().st_mtime_ns == stamp
    assert "mine.tsv:" in (config.output / "rejected.tsv").read_text()
    assert not config.output.with_name("ready.unfinished").exists()


def test_no_english_sentence_is_in_two_parts(text: PreparedText) -> None:
    keys = {
        part: {hold_out.key(line.split("\t")[2]) for line in (text.folder / f"{part}.tsv").read_text().splitlines()}
        for part in ("train", "dev", "test")
    }
    assert all(keys.values())
    assert not keys["train"] & keys["dev"]
    assert not keys["train"] & keys["test"]
    assert not keys["dev"] & keys["test"]


def test_batches_depend_on_the_step_alone(text: PreparedText) -> None:
    again = open_text(text.folder)
    for step in (0, 5, 40, 1000):
        one, two = text.batch(step), again.batch(step)
        np.testing.assert_array_equal(one["source"], two["source"])
        np.testing.assert_array_equal(one["target"], two["target"])
        assert one["source"].shape == one["target"].shape
        assert one["source"].shape in shapes(1152, 72)
        for ids in one.values():
            assert ids.dtype == np.int32
            ends = (ids == EOS).sum(1)
            assert (ends == 1).all(), "every sentence ends once"
    assert not np.array_equal(text.batch(0)["source"], text.batch(1)["source"])


def test_batches_are_real_sentences_and_sorted_into_their_shapes(text: PreparedText) -> None:
    english = {line.split("\t")[2] for line in (text.folder / "train.tsv").read_text().splitlines()}
    for step in range(16):
        for row in text.batch(step)["target"]:
            assert text.english([i for i in row if i > EOS]) in english


def test_short_sentences_make_short_rows() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, (2, 4000))
    at = [np.concatenate([[0], np.cumsum(n)]) for n in lengths]
    ids = [rng.integers(3, 99, a[-1]).astype(np.int32) for a in at]
    data = Encoded(("a", "b"), rng.integers(0, 2, 4000).astype(np.int32), ids[0], ids[1], at[0], at[1])
    batches = Batches(data, tokens=384, length=24, temperature=1.0, seed=3)
    assert batches.too_long == (lengths.max(0) + 1 > 24).sum()
    seen = [batches.batch(step) for step in range(64)]
    assert {b["source"].shape for b in seen} == {(32, 12), (16, 24)}
    used = np.mean([(b["source"] > 0).mean() for b in seen])
    one_shape = np.mean(lengths[0][lengths.max(0) < 24] + 1) / 24
    assert used > 1.05 * one_shape, "rows of two lengths hold more text than rows of one"


def test_temperature_brings_up_rare_languages(config: PrepareConfig, text: PreparedText) -> None:
    natural = sum(text.batches.data.language == text.batches.data.languages.index("fr")) / len(text.batches.data)
    order = {tuple(text.batches.data.source[a:b]): n for a, b, n in zip(
        text.batches.data.source_at, text.batches.data.source_at[1:], text.batches.data.language, strict=False)}
    drawn = [
        order[tuple(int(i) for i in row if i > EOS)] for step in range(32) for row in text.batch(step)["source"]
    ]
    share = np.mean(np.array(drawn) == text.batches.data.languages.index("fr"))
    expected = natural**0.5 / (natural**0.5 + (1 - natural) ** 0.5)
    assert abs(share - expected) < 0.06
    assert expected > natural + 0.05


def test_held_out_batches_have_one_shape(text: PreparedText) -> None:
    batches = text.held_out()
    assert {b["source"].shape for b in batches} == {(1152 // 72, 72)}
    count = (text.folder / "dev.tsv").read_text().count("\n")
    assert sum(int((b["target"] == EOS).sum()) for b in batches) == count > 0


def test_every_pair_once_in_order() -> None:
    data = Encoded(
        ("de",), np.zeros(3, np.int32), np.array([5, 6, 7, 8, 9, 9, 9, 9], np.int32), np.array([3, 4, 5], np.int32),
        np.array([0, 2, 3, 8]), np.array([0, 1, 2, 3]),
    )  # fmt: skip
    (batch,) = in_order(data, rows=4, length=4)  # the third pair is too long
    assert batch["source"].tolist() == [[5, 6, 1, 0], [7, 1, 0, 0], [0] * 4, [0] * 4]
    assert batch["target"].tolist() == [[3, 1, 0, 0], [4, 1, 0, 0], [0] * 4, [0] * 4]


def test_examples_and_counts(text: PreparedText) -> None:
    examples = text.examples(6)
    assert {e.language for e in examples} == {"de", "fr"}
    assert examples == text.examples(6)
    assert text.target_counts().sum() == len(text.batches.data.target) + len(text.batches.data)
    assert text.english(text.target.encode(["the house opens"])[0]) == "the house opens"


def test_a_vocabulary_larger_than_the_text_says_how_large_it_may_be(config: PrepareConfig) -> None:
    with pytest.raises(VocabularyError, match=r"vocabulary of 9000 is larger(.|\n)*at most \d+"):
        learn(["only a few words", "and a few more"], 9000, 8000, "source")
    with pytest.raises(VocabularyError, match="too small"):
        learn(["some text"], 10, 8000, "source")
    with pytest.raises(VocabularyError, match="no text"):
        learn(["", ""], 400, 8000, "source")
    assert learn([f"{a} {b}" for a in NOUNS for b in VERBS], None, 8000, "target").size < 8000


def test_a_damaged_vocabulary_is_noticed(text: PreparedText, tmp_path: Path) -> None:
    broken = bytearray(text.source.model)
    broken[100] ^= 1
    (tmp_path / "v.model").write_bytes(bytes(broken))
    with pytest.raises(VocabularyError, match="not the one that was learnt"):
        Vocabulary.load(tmp_path / "v.model", text.source.sha256)
    with pytest.raises(VocabularyError, match="cannot be read"):
        Vocabulary.load(tmp_path / "absent.model")


def test_a_missing_source_is_said_and_left_out(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then has nowhere to look
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    settings = {"cache": tmp_path / "cache", "sources": ("django",), "dev": 0.1, "test": 0.1}
    done = prepare(PrepareConfig(output=tmp_path / "out", files=config.files, **settings))  # type: ignore[arg-type]
    assert "django 5.2.19: not to be had, going on without it" in str(done)
    with pytest.raises(CorpusError, match=r"not one pair of sentences(.|\n)*--files"):
        prepare(PrepareConfig(output=tmp_path / "none", cache=tmp_path / "cache", sources=("django",)))


def test_an_archive_is_fetched_once_and_checked(tmp_path: Path) -> None:
    django = Source("django", "5.2.19", "BSD-3-Clause", lambda path: iter(()))
    folder = tmp_path / "packages" / "django-5.2.19"
    folder.mkdir(parents=True)
    (folder / "django-5.2.19.whl").write_bytes(b"content")
    (folder / "django-5.2.19.whl.sha256").write_text(fetch.checksum(folder / "django-5.2.19.whl") + "\n")
    assert fetch.fetch(django, tmp_path).was_there


def test_settings_that_make_no_sense() -> None:
    for wrong in ({"dev": 0.0}, {"test": 0.6}, {"length": 2}, {"temperature": 0.5}, {"sources": ()}):
        with pytest.raises(CorpusError):
            PrepareConfig(**wrong)  # type: ignore[arg-type]


def test_the_manifest_tells_where_everything_is_from(config: PrepareConfig, text: PreparedText) -> None:
    manifest = json.loads((config.output / "manifest.json").read_text())
    assert manifest["files"] == [{"path": str(config.files[0]), "pairs": manifest["files"][0]["pairs"], "rejected": 1}]
    assert sum(manifest["languages"].values()) == sum(manifest["pairs"].values())
