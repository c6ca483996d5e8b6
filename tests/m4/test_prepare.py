"""From a user's file to batches: complete or not at all, deterministic, and clear about what cannot be."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from gshard_m4.batches import EOS, PAD, Batches, Encoded, Shape, in_order
from gshard_m4.corpus import fetch, hold_out
from gshard_m4.corpus.source import SOURCES
from gshard_m4.encoded import write
from gshard_m4.errors import CorpusError, VocabularyError
from gshard_m4.prepare import PrepareConfig, prepare
from gshard_m4.text import PreparedText
from gshard_m4.tokens import Vocabulary, learn

NOUNS = "house river stone bridge window garden letter doctor market winter summer candle forest island engine".split()
VERBS = "opens closes finds loses paints burns carries follows hides breaks mends washes sells counts draws".split()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
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
def text(config):
    done = prepare(config)
    assert not done.was_there
    assert "1 lines rejected" in str(done)
    return PreparedText.load(config.output)


def test_nothing_is_done_twice(config, text):
    stamp = (config.output / "train" / "source.npy").stat().st_mtime_ns
    assert prepare(config).was_there
    assert (config.output / "train" / "source.npy").stat().st_mtime_ns == stamp
    assert "mine.tsv:" in (config.output / "rejected.tsv").read_text()
    assert not config.output.with_name("ready.unfinished").exists()


def test_no_english_sentence_is_in_two_parts(text):
    keys = {
        part: {hold_out.key(line.split("\t")[2]) for line in (text.folder / f"{part}.tsv").read_text().splitlines()}
        for part in ("train", "dev", "test")
    }
    assert all(keys.values())
    assert not keys["train"] & keys["dev"]
    assert not keys["train"] & keys["test"]
    assert not keys["dev"] & keys["test"]


def sentences(row):
    """The sentences of a row, without their ends."""
    found = [[]]
    for i in row[row != PAD]:
        found.append([]) if i == EOS else found[-1].append(int(i))
    assert found.pop() == [], "a row ends where a sentence does"
    return found


def test_batches_depend_on_the_step_alone(text):
    again = PreparedText.load(text.folder)
    shape = text.batches.shape
    for step in (0, 5, 40, 1000):
        one, two = text.batch(step), again.batch(step)
        np.testing.assert_array_equal(one["source"], two["source"])
        np.testing.assert_array_equal(one["target"], two["target"])
        assert (one["source"].shape, one["target"].shape) == ((shape.rows, shape.source), (shape.rows, shape.target))
        for ids in one.values():
            assert ids.dtype == np.int32
            assert not ((ids[:, :-1] == PAD) & (ids[:, 1:] != PAD)).any(), "padding comes last"
        assert ((one["source"] == EOS).sum(1) == (one["target"] == EOS).sum(1)).all(), "sources belong to targets"
    assert not np.array_equal(text.batch(0)["source"], text.batch(1)["source"])


def test_rows_are_real_pairs_and_half_of_them_name_their_language(text):
    lines = (text.folder / "train.tsv").read_text().splitlines()
    known = {(language, tuple(text.source_ids(foreign)), english) for language, foreign, english in
             (line.split("\t") for line in lines)}  # fmt: skip
    tagged = total = 0
    for step in range(8):
        batch = text.batch(step)
        for source, target in zip(batch["source"], batch["target"], strict=True):
            for ids, english in zip(sentences(source), sentences(target), strict=True):
                named = [name for name in ("de", "fr") if ids[0] == text.tag(name)]
                own = tuple(ids[1:] if named else ids)
                assert any((name, own, text.english(english)) in known for name in named or ("de", "fr"))
                tagged, total = tagged + bool(named), total + 1
    assert abs(tagged / total - 0.5) < 4 * 0.5 / total**0.5
    assert max(int(batch["source"].max()) for batch in map(text.batch, range(8))) < text.source_vocabulary


def random_text(count, languages, longest, ratio=1.0):
    rng = np.random.default_rng(0)
    target = rng.geometric(0.12, count)
    source = np.ceil(ratio * target * rng.uniform(0.7, 1.3, count)).astype(int)
    lengths = np.minimum([source, target], longest)
    at = [np.concatenate([[0], np.cumsum(n)]) for n in lengths]
    ids = [rng.integers(3, 99, a[-1]).astype(np.uint16) for a in at]
    ids[0][at[0][:-1]] = np.arange(count) + 100  # the first id says which pair it is
    names = tuple(f"l{i}" for i in range(languages))
    return Encoded(names, (rng.random(count) ** 2 * languages).astype(np.uint16), ids[0], ids[1], at[0], at[1])


@pytest.mark.parametrize("ratio", [0.6, 1.0, 1.5])
def test_little_of_a_batch_is_padding(ratio):
    data = random_text(4000, 2, 80, ratio)
    batches = Batches(data, tokens=4096, length=64, temperature=1.0, seed=3)
    assert (data.lengths > 64).any()
    seen = [batches.batch(step) for step in range(8)]
    shapes = {(b["source"].shape, b["target"].shape) for b in seen}
    assert len(shapes) == 1, "one shape, one compilation"
    assert (batches.shape.source > batches.shape.target) == (ratio > 1)
    slots = batches.shape.rows * (batches.shape.source + batches.shape.target)
    text = np.mean([((b["source"] > 0).sum() + (b["target"] > 0).sum()) / slots for b in seen])
    assert text > 0.88


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 5.0])
def test_long_sentences_are_drawn_as_often_as_short_ones(temperature):
    data = random_text(3000, 3, 200)
    batches = Batches(data, tokens=4096, length=128, temperature=temperature, seed=1)
    drawn = np.zeros(len(data))
    for step in range(400):
        own = np.zeros(len(data))
        for row in batches.batch(step)["source"]:
            firsts = row[row >= 100]  # the first id of each sentence says which pair it is
            own += np.bincount(firsts - 100, minlength=len(data))
        drawn += own
    fits = data.lengths <= 128
    assert not drawn[~fits].any()
    sizes = np.bincount(data.language[fits], minlength=3)
    wanted = sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum()
    for number in range(3):
        own = fits & (data.language == number)
        assert abs(drawn[own].sum() / drawn.sum() - wanted[number]) < 0.01
        each = drawn[own].mean()
        for low, high in ((0, 16), (16, 32), (32, 64)):
            some = own & (data.lengths > low) & (data.lengths <= high)
            # What does not fit any more at the end of a batch is a long one somewhat more often.
            assert abs(drawn[some].mean() / each - 1) < 4 / np.sqrt(drawn[some].sum()) + 0.02


def test_each_process_reads_its_part():
    batches = Batches(random_text(500, 2, 40), tokens=1024, length=32, temperature=2.0, seed=0)
    assert batches.shape.rows == 32
    for step in range(20):
        whole = batches.batch(step)
        for processes in (2, 3, 4, 5, 8, 40):
            parts = [batches.batch(step, process, processes) for process in range(processes)]
            for side in ("source", "target"):
                np.testing.assert_array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_ids_are_mapped_from_files_that_grow(tmp_path):
    rng = np.random.default_rng(0)
    rows = [[list(rng.integers(0, 60_000, n)) for n in rng.integers(0, 9, 300)] for _ in range(2)]
    language = rng.integers(0, 3, 300).tolist()
    blocks = [slice(start, start + 70) for start in range(0, 300, 70)]
    in_blocks = ((language[block], rows[0][block], rows[1][block]) for block in blocks)
    write(tmp_path / "train", ["a", "b", "c"], 64_000, 70_000, in_blocks)
    found = Encoded.load(tmp_path / "train")
    assert isinstance(found.source, np.memmap)
    assert (found.source.dtype, found.target.dtype) == (np.uint16, np.int32)
    assert found.language.tolist() == language
    for ids, at, own in ((found.source, found.source_at, rows[0]), (found.target, found.target_at, rows[1])):
        assert [ids[a:b].tolist() for a, b in itertools.pairwise(at)] == own
    some = found.only([7, 0, 299])
    assert some.target[some.target_at[1] : some.target_at[2]].tolist() == rows[1][0]
    (tmp_path / "train" / "target_at.npy").write_bytes((tmp_path / "train" / "source_at.npy").read_bytes())
    with pytest.raises(CorpusError, match=r"missing or damaged(.|\n)*do not belong together"):
        Encoded.load(tmp_path / "train")


def test_one_language_of_a_corpus(text):
    french = text.of_languages(["fr"])
    assert french.fingerprint == text.fingerprint, "the vocabularies are the same"
    assert set(french.languages) == {"fr"}
    batch = french.batch(0)
    assert text.tag("fr") in batch["source"]
    assert text.tag("de") not in batch["source"]
    examples = [e for e in text.examples(60) if e.language == "fr"]
    assert french.examples(len(examples)) == examples, "the same sentences are scored"
    ends = [sum(int((b["target"] == EOS).sum()) for b in of.held_out()) for of in (french, text)]
    assert 0 < ends[0] < ends[1]
    with pytest.raises(CorpusError, match=r"no language 'frr' here(.|\n)*de, fr"):
        text.of_languages(["frr"])


def test_held_out_batches_have_one_shape(text):
    batches = text.held_out()
    shape = text.batches.shape
    assert {b["source"].shape for b in batches} == {(shape.rows, shape.source)}
    assert max(int(b["source"].max()) for b in batches) < text.source.size, "none is told its language"
    count = (text.folder / "dev.tsv").read_text().count("\n")
    assert sum(int((b["target"] == EOS).sum()) for b in batches) == count > 0


def test_every_pair_once_in_order():
    data = Encoded(
        ("de",), np.zeros(4, np.int32), np.array([5, 6, 7, 8, 9, 9, 9, 9, 8], np.int32),
        np.array([3, 4, 5, 6], np.int32), np.array([0, 2, 3, 8, 9]), np.array([0, 1, 2, 3, 4]),
    )  # fmt: skip
    first, second = in_order(data, Shape(1, 6, 4), length=4)  # the third pair is too long
    assert (first["source"].tolist(), first["target"].tolist()) == ([[5, 6, 1, 7, 1, 0]], [[3, 1, 4, 1]])
    assert (second["source"].tolist(), second["target"].tolist()) == ([[8, 1, 0, 0, 0, 0]], [[6, 1, 0, 0]])


def test_a_vocabulary_larger_than_the_text_says_how_large_it_may_be(config):
    with pytest.raises(VocabularyError, match=r"vocabulary of 9000 is larger(.|\n)*at most \d+"):
        learn(["only a few words", "and a few more"], 9000, 8000, "source")
    with pytest.raises(VocabularyError, match="too small"):
        learn(["some text"], 10, 8000, "source")
    with pytest.raises(VocabularyError, match="no text"):
        learn(["", ""], 400, 8000, "source")
    assert learn([f"{a} {b}" for a in NOUNS for b in VERBS], None, 8000, "target").size < 8000


def test_a_damaged_vocabulary_is_noticed(text, tmp_path, rng):
    for _ in range(240):
        broken = bytearray(text.source.model)
        broken[rng.integers(len(broken))] ^= 1 << int(rng.integers(8))
        (tmp_path / "v.model").write_bytes(bytes(broken))
        with pytest.raises(VocabularyError, match="not the one that was learnt"):
            Vocabulary.load(tmp_path / "v.model", text.source.sha256)
    with pytest.raises(VocabularyError, match="cannot be read"):
        Vocabulary.load(tmp_path / "absent.model")


def test_a_missing_source_is_said_and_left_out(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then has nowhere to look
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    settings = {"cache": tmp_path / "cache", "sources": ("django",), "dev": 0.1, "test": 0.1}
    done = prepare(PrepareConfig(output=tmp_path / "out", files=config.files, **settings))
    assert "django 5.2.19: not to be had, going on without it" in str(done)
    with pytest.raises(CorpusError, match=r"not one pair of sentences(.|\n)*--files"):
        prepare(PrepareConfig(output=tmp_path / "none", cache=tmp_path / "cache", sources=("django",)))


def test_an_archive_is_fetched_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    folder = tmp_path / "packages" / "django-5.2.19"
    folder.mkdir(parents=True)
    (folder / "django.whl").write_bytes(b"content")
    (folder / fetch.SUMS).write_text(f"{fetch.checksum(folder / 'django.whl')}  django.whl\n")
    got = fetch.Fetcher(tmp_path).fetch(SOURCES["django"])
    assert (got.was_there, got.files) == (True, [folder / "django.whl"])
    (folder / "django.whl").write_bytes(b"Content")
    assert fetch.Fetcher(tmp_path).fetch(SOURCES["django"]).problem, "what has changed is not taken"


def test_settings_that_make_no_sense():
    nothing = {"sources": ()}
    for wrong in (
        {"dev": 0.0},
        {"test": 0.6},
        {"length": 2},
        {"temperature": 0.5},
        {"temperature": math.nan},
        nothing,
        {"jobs": 0},
        {"quota": -1},
        {"only": ("English",)},
        {"only": ("de",), "languages": 3},
    ):
        with pytest.raises(CorpusError):
            PrepareConfig(**wrong)


def test_languages_are_kept_by_name(config, tmp_path):
    named = dataclasses.replace(config, only=("welsh", "de_AT", "German"))
    assert named.only == ("cy", "de")
    assert named.fingerprint != config.fingerprint
    with pytest.raises(CorpusError, match=r"no text in Welsh here(.|\n)*There are: de, fr"):
        prepare(dataclasses.replace(named, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_manifest_tells_where_everything_is_from(config, text):
    manifest = json.loads((config.output / "manifest.json").read_text())
    assert manifest["files"] == [{"path": str(config.files[0]), "pairs": manifest["files"][0]["pairs"], "rejected": 1}]
    assert sum(manifest["languages"].values()) == sum(manifest["pairs"].values())
