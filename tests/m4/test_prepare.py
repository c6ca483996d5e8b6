"""From a user's file to batches: complete or not at all, deterministic, and clear about what cannot be."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from gshard_m4 import prepare as preparing
from gshard_m4.batches import EOS, PAD, Batches, Encoded, Shape, in_order
from gshard_m4.corpus import extract as extracting
from gshard_m4.corpus import fetch, hold_out
from gshard_m4.corpus.fetch import Fetched
from gshard_m4.corpus.pair import Pair
from gshard_m4.corpus.source import SOURCES, Source
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


@pytest.fixture
def fresh(config, tmp_path):
    """The same text, prepared in a folder of this test."""
    return dataclasses.replace(config, output=tmp_path / "out", cache=tmp_path / "cache")


def quiet(text):
    pass


def test_nothing_is_done_twice_and_no_english_sentence_is_in_two_parts(config, text):
    stamp = (config.output / "train" / "source.npy").stat().st_mtime_ns
    os.utime(config.files[0])
    assert prepare(config).was_there, "the contents count, not the time"
    assert (config.output / "train" / "source.npy").stat().st_mtime_ns == stamp
    assert "mine.tsv:" in (config.output / "rejected.tsv").read_text()
    assert not config.output.with_name("ready.unfinished").exists()
    manifest = json.loads((config.output / "manifest.json").read_text())
    assert manifest["files"] == [{"path": str(config.files[0]), "pairs": manifest["files"][0]["pairs"], "rejected": 1}]
    assert sum(manifest["languages"].values()) == sum(manifest["pairs"].values())
    parts = [
        {hold_out.key(line.split("\t")[2]) for line in (text.folder / f"{part}.tsv").read_text().splitlines()}
        for part in ("train", "dev", "test")
    ]
    assert all(parts)
    assert not any(one & other for one, other in itertools.combinations(parts, 2))


def test_vocabularies_do_not_depend_on_the_order_of_sets(fresh, text):
    """In a process with other hashes than this one."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    program = (
        "from pathlib import *; from gshard_m4.prepare import *; from gshard_m4.text import PreparedText\n"
        f"c = {fresh!r}; prepare(c); print(hash('river'), PreparedText.load(c.output).fingerprint)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    hashed, fingerprint = done.stdout.splitlines()[-1].split()
    assert int(hashed) != hash("river")
    assert text.fingerprint == fingerprint


def test_pairs_that_are_too_long_are_counted_and_told(fresh):
    short = dataclasses.replace(fresh, length=20, tokens=320)
    done = prepare(short, quiet)
    assert 0 < done.manifest["too_long"] < done.manifest["pairs"]["train"]
    assert "longer than 20 tokens" in str(done)
    with pytest.raises(CorpusError, match="no pair of the train part fits into 4 tokens"):
        prepare(dataclasses.replace(fresh, length=4), quiet)
    assert PreparedText.load(fresh.output).length == 20, "what was there is still there"
    assert [path.name for path in fresh.output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("inside", [{"thesis.txt": "years of work"}, {"manifest.json": '{"name": "a web site"}'}])
def test_a_folder_of_something_else_is_left_alone(fresh, inside):
    fresh.output.mkdir()
    for name, text in inside.items():
        (fresh.output / name).write_text(text)
    with pytest.raises(CorpusError, match="not a prepared corpus"):
        prepare(fresh, quiet)
    assert {path.name: path.read_text() for path in fresh.output.iterdir()} == inside


def test_changed_files_are_prepared_again_and_damaged_corpora_are_told(fresh, tmp_path):
    (tmp_path / "talk.de").write_text("wer ist da\nniemand war hier\n" * 9)
    (tmp_path / "talk.en").write_text("who is there\nnobody was here\n" * 9)
    both = dataclasses.replace(fresh, files=(*fresh.files, tmp_path / "talk.de"))
    assert not prepare(both, quiet).was_there
    (tmp_path / "talk.en").write_text("who was there\nnobody was here\n" * 9)
    assert not prepare(both, quiet).was_there
    for name, content, told in (
        ("dev/source.npy", b"\x93NUMPY", r"missing or damaged(.|\n)*dev/source.npy"),
        ("test.tsv", b"one field\n", r"missing or damaged(.|\n)*test.tsv"),
        ("manifest.json", b"{}", "there is no prepared corpus"),
    ):
        (both.output / name).write_bytes(content)
        with pytest.raises(CorpusError, match=told):
            PreparedText.load(both.output).examples(3), PreparedText.load(both.output).held_out()


class Shop:
    """Packages that can be had or not."""

    open, asked = False, 0

    def __init__(self, folder):
        self.folder = folder / "shop"
        self.folder.mkdir()
        (self.folder / "shop.whl").write_bytes(b"")
        self.source = Source("shop", "pip", ("shop",), "1.0", "shop", "", "MIT", ("tiny",))

    def read(self, files):
        return (Pair("fr", f"le mot {a} {b}", f"that word {b} {a}") for a in NOUNS for b in NOUNS)

    def __call__(self, cache):
        return self

    def fetch(self, source):
        self.asked += 1
        return Fetched(source, {"shop.whl": "00"}, self.folder) if self.open else Fetched(source, problem="closed")


def test_packages_come_back_and_are_never_lost(fresh, monkeypatch):
    shop = Shop(fresh.output.parent)
    monkeypatch.setitem(SOURCES, "shop", shop.source)
    monkeypatch.setattr(preparing, "Fetcher", shop)
    monkeypatch.setattr(extracting, "READERS", {"shop": shop.read})
    config = dataclasses.replace(fresh, sources=("shop",))
    told = []
    assert "shop 1.0: not to be had" in str(prepare(config, told.append))
    assert told[0] == "[1/1] shop 1.0: not to be had, going on without it (closed)"
    assert prepare(config, quiet).was_there
    shop.open = True
    assert not prepare(config, quiet).was_there, "it is asked for again"
    asked = shop.asked
    assert prepare(config, quiet).was_there
    assert shop.asked == asked, "nothing is missing, nothing is asked for"
    shop.open = False
    with pytest.raises(CorpusError, match=r"shop 1.0 is not to be had, and the corpus here has it(.|\n)*--output"):
        prepare(dataclasses.replace(config, sampling_seed=1), quiet)
    assert json.loads((config.output / "manifest.json").read_text())["sources"][0]["pairs"] > 100


def test_missing_sources_are_said_and_left_out(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then has nowhere to look
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    names = ("django", "gvfs-common", "ddtp", "scratch-l10n")
    said = str(prepare(dataclasses.replace(fresh, sources=names), quiet))
    assert "django 5.2.19: not to be had, going on without it" in said
    for name, missing in zip(("gvfs-common", "ddtp", "scratch-l10n 6.1.116"), ("apt-get", "apt-get", "npm")):
        assert f"{name}: not to be had, going on without it (this system has no {missing})" in said
    with pytest.raises(CorpusError, match=r"not one pair of sentences(.|\n)*--files"):
        prepare(PrepareConfig(output=tmp_path / "none", cache=tmp_path / "cache", sources=("django",)))


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


@pytest.mark.parametrize("ratio", [0.6, 1.5])
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


def test_long_sentences_are_drawn_as_often_as_short_ones():
    data, temperature = random_text(3000, 3, 200), 5.0
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
    shape = text.batches.shape
    assert {b["source"].shape for b in text.held_out()} == {(shape.rows, shape.source)}
    assert max(int(b["source"].max()) for b in text.held_out()) < text.source.size, "no language token"
    assert (text.folder / "dev.tsv").read_text().count("\n") == ends[1]


def test_every_pair_once_in_order():
    data = Encoded(
        ("de",), np.zeros(4, np.int32), np.array([5, 6, 7, 8, 9, 9, 9, 9, 8], np.int32),
        np.array([3, 4, 5, 6], np.int32), np.array([0, 2, 3, 8, 9]), np.array([0, 1, 2, 3, 4]),
    )  # fmt: skip
    first, second = in_order(data, Shape(1, 6, 4), length=4)  # the third pair is too long
    assert (first["source"].tolist(), first["target"].tolist()) == ([[5, 6, 1, 7, 1, 0]], [[3, 1, 4, 1]])
    assert (second["source"].tolist(), second["target"].tolist()) == ([[8, 1, 0, 0, 0, 0]], [[6, 1, 0, 0]])


def test_a_vocabulary_larger_than_the_text_says_how_large_it_may_be(config):
    for lines, size, told in (
        (["only a few words", "and a few more"], 9000, r"vocabulary of 9000 is larger(.|\n)*at most \d+"),
        (["some text"], 10, "too small"),
        (["", ""], 400, "no text"),
    ):
        with pytest.raises(VocabularyError, match=told):
            learn(lines, size, 8000, "source")
    assert learn([f"{a} {b}" for a in NOUNS for b in VERBS], None, 8000, "target").size < 8000


def test_a_damaged_vocabulary_is_noticed(text, tmp_path, rng):
    for _ in range(100):
        broken = bytearray(text.source.model)
        broken[rng.integers(len(broken))] ^= 1 << int(rng.integers(8))
        (tmp_path / "v.model").write_bytes(bytes(broken))
        with pytest.raises(VocabularyError, match="not the one that was learnt"):
            Vocabulary.load(tmp_path / "v.model", text.source.sha256)
    with pytest.raises(VocabularyError, match="cannot be read"):
        Vocabulary.load(tmp_path / "absent.model")


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


@pytest.mark.parametrize("wrong", [
    {"dev": 0.0}, {"test": 0.6}, {"length": 2}, {"temperature": 0.5}, {"temperature": math.nan}, {"sources": ()},
    {"jobs": 0}, {"quota": -1}, {"only": ("English",)}, {"only": ("de",), "languages": 3},
])  # fmt: skip
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(CorpusError):
        PrepareConfig(**wrong)


def test_languages_are_kept_by_name(config, tmp_path):
    named = dataclasses.replace(config, only=("welsh", "de_AT", "German"))
    assert named.only == ("cy", "de")
    assert named.fingerprint != config.fingerprint
    with pytest.raises(CorpusError, match=r"no text in Welsh here(.|\n)*There are: de, fr"):
        prepare(dataclasses.replace(named, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
