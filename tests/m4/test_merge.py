"""Merging, the split by quota, near twins, and what is left of a stop at any point."""

import csv
import dataclasses
import gzip
import hashlib
import importlib.util
import itertools
from collections import Counter

import numpy as np
import pytest
from rapidfuzz import fuzz

from gshard_m4 import prepare as preparing
from gshard_m4.corpus import hold_out
from gshard_m4.corpus.extract import SAME_AGAIN
from gshard_m4.corpus.merge import COPY, FEW, MORE, merge
from gshard_m4.corpus.near_twins import RATIO, NearTwins
from gshard_m4.corpus.part import GIVEN, PARTS, Split, write_parts
from gshard_m4.prepare import PrepareConfig, prepare
from gshard_m4.text import PreparedText

NOUNS = "house river stone bridge window garden letter doctor market winter summer candle forest island".split()
VERBS = "opens closes finds loses paints burns carries follows hides breaks mends washes sells counts".split()


def quiet(text):
    pass


def merged(folder, sources, **options):
    files = {}
    for name, text in sources.items():
        files[name] = folder / f"{name}.pairs"
        files[name].write_text(text, encoding="utf-8")
    work = folder / "work"
    work.mkdir()
    settings = {"least": 1, "most": None, "always": [], **options}
    return merge(files, work, folder / "aside.gz", **settings)


def test_each_pair_once_and_what_is_left_out_is_written_aside(tmp_path):
    first = (
        "de\tGut so\tGood then\nde\tgut so.\tgood then\nde\tGut\tgood then\nde\tToll\tGood then\nde\tPrima\tGood Then\n"
    )
    second = (
        "es\testo es una frase\tthis is a sentence\ngn\testo es una frase\tthis is a sentence\n"
        "gl\testo es una frase\tthis is a sentence\nde\tGUT SO!\tGood then:\n"
        "es\tcorto\tshort one\ngn\tcorto\tshort one\n"
    )
    found = merged(tmp_path, {"first": first, "second": second})
    assert found.left_out == {SAME_AGAIN: 2, MORE: 1, COPY: 1}
    assert (found.languages, found.sources) == ({"de": 3, "es": 2, "gl": 1, "gn": 1}, {"first": 3, "second": 4})
    assert list(found.files) == ["de", "es", "gl", "gn"], "the largest first"
    assert found.files["gn"].read_text() == "corto\tshort one\n"
    aside = gzip.decompress((tmp_path / "aside.gz").read_bytes()).decode().splitlines()
    assert Counter(line.split("\t")[0] for line in aside) == found.left_out
    assert f"{COPY}\tgn\testo es una frase\tthis is a sentence" in aside


def test_the_largest_languages_and_the_users_own_are_kept(tmp_path):
    sizes = {"de": 9, "fr": 7, "it": 5, "cy": 1}
    text = "".join(f"{code}\twort {i} {code}\tword number {i}\n" for code, n in sizes.items() for i in range(n))
    found = merged(tmp_path, {"a": text}, least=2, most=2, always=["cy", "xh"])
    assert (list(found.files), found.left_out) == (["de", "fr", "cy"], {FEW: 5})
    aside = gzip.decompress((tmp_path / "aside.gz").read_bytes()).decode().splitlines()
    assert {line.split("\t")[1] for line in aside} == {"it"}


def sentences(count):
    rng = np.random.default_rng(0)
    words = [f"{a}{b}" for a in NOUNS for b in VERBS]
    made = [" ".join(words[i] for i in rng.integers(0, len(words), 8)) for _ in range(count)]
    return [f"The {text}." for text in made]


def test_what_the_test_of_ones_own_has_is_not_trained_on(tmp_path):
    english = sentences(400)
    (tmp_path / "de.tsv").write_text(
        "".join(f"Satz {i} {t[:40]}\t{t}\n" for i, t in enumerate(english)), encoding="utf-8"
    )
    tested = tmp_path / "own.tsv"
    tested.write_text(f"de\tMenschen sind frei\t{english[7].upper()}\n", encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    files = {"de": tmp_path / "de.tsv"}
    found = write_parts(files, out, Split(0.1, 0.1, 0), tmp_path / "aside.gz", {"test": tested})
    assert (out / "test.tsv").read_text() == tested.read_text()
    assert (found["pairs"]["test"], found["kept_out"]) == (1, {GIVEN: 1})
    assert gzip.decompress((tmp_path / "aside.gz").read_bytes()).decode().endswith(f"\t{english[7]}\n")
    others = set(found["pairs"]) - {"test"}
    written = [line.split("\t")[2] for part in others for line in (out / f"{part}.tsv").read_text().splitlines()]
    assert sorted(written) == sorted(set(english) - {english[7]})
    assert found["frequent_sentence"] in english


@pytest.fixture
def config(tmp_path):
    english = sentences(2000)
    text = "".join(f"{code}\t{t[::-1]} {code}\t{t}\n" for code in ("de", "fr", "cy") for t in english)
    (tmp_path / "mine.tsv").write_text(text + "bad\n", encoding="utf-8")
    return PrepareConfig(
        output=tmp_path / "out", cache=tmp_path / "cache", sources=(), files=(tmp_path / "mine.tsv",), quota=50,
        source_vocabulary=400, target_vocabulary=400, length=64,
    )  # fmt: skip


def digest(folder):
    def contents(path):
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()

    files = {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".svg"}  # it has a date in it
    return {str(path.relative_to(folder)): hashlib.sha256(contents(path)).hexdigest() for path in sorted(files)}


def test_a_stop_at_any_stage_costs_that_stage_only(config, monkeypatch):
    prepare(config, quiet)
    whole = digest(config.folder)
    assert {"manifest.json", "train/source.npy", "distribution.csv", "left-out/files.tsv.gz"} < set(whole)
    assert not [name for name in whole if "done" in name or "begun" in name]
    rows = list(csv.DictReader((config.folder / "distribution.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    assert {row["language"] for row in rows} == {"de", "fr", "cy"}
    text = PreparedText.load(config.folder)
    assert sum(int(row["train"]) for row in rows) == text.manifest["pairs"]["train"]
    assert all(int(row["english_words"]) == 9 * sum(int(row[p]) for p in PARTS) for row in rows)
    assert text.frequent_sentence() in set(sentences(2000))
    assert importlib.util.find_spec("matplotlib") is None or "<svg" in (config.folder / "distribution.svg").read_text()
    other = dataclasses.replace(config, output=config.folder.with_name("other"))
    steps = ["merge", "write_parts", "learn_source", "learn_target", "encode"]
    ran = []
    for stopped in steps:
        with monkeypatch.context() as patch:
            for name in steps:
                real = getattr(preparing, name)

                def run(*args, real=real, name=name, stopped=stopped, **more):
                    ran.append(name)
                    done = real(*args, **more)
                    if name == stopped:  # all files are written, but the stage is not recorded yet
                        raise KeyboardInterrupt
                    return done

                patch.setattr(preparing, name, run)
            with pytest.raises(KeyboardInterrupt):
                prepare(other, quiet)
        assert not other.folder.exists()
    text = ["merge", "write_parts"]  # they are one stage
    later = ["learn_source", "learn_source", "learn_target", "learn_target", "encode"]
    assert ran == ["merge", *text, *text, *later], "nothing but a stopped stage twice"
    assert not prepare(other, quiet).was_there
    assert digest(other.folder) == whole


def test_all_near_twins_are_found_and_no_others(rng):
    """The window of lengths leaves none out."""
    keys = ["".join(rng.choice(list("ab "), size)).strip() for size in rng.integers(1, 25, 300)]
    english = NearTwins(keys[:200])
    found = [english.has(key) for key in keys[200:]]
    assert found == [any(fuzz.ratio(key, other) >= RATIO for other in keys[:200]) for key in keys[200:]]
    assert any(found)
    assert not all(found)

    short = (("group on", "group off"), ("motion sense", "motion sensor"), ("probability tonight", "probability night"))
    for key, twin in short:  # these were held out although training had the other one
        assert NearTwins([key, twin]).has(key, besides_itself=True)
        assert not NearTwins([key, "something else"]).has(key, besides_itself=True)
        assert NearTwins([key]).has(key), "an equal sentence in another text is a twin"


def test_what_is_held_out_has_no_near_twin(rng):
    letters = list("abcdefghijklmnopqrstuvwxyz")
    lone = [" ".join("".join(rng.choice(letters, 9)) for _ in range(3)) for _ in range(300)]
    twins = [f"{line} {ending}" for line in lone[:150] for ending in ("a", "b")]
    keys = [hold_out.key(line) for line in [*lone[150:], *twins]]
    parts = hold_out.parts(keys, 0.05, 0.1)
    held = [key for key, part in parts.items() if part != hold_out.TRAIN]
    assert list(parts.values()).count(hold_out.TEST) == round(0.1 * len(keys))
    assert set(held) <= set(lone[150:])
    prose = {"de": keys, "cy": keys[:60], "xh": keys[:5]}
    by_quota = hold_out.parts_by_quota([*keys, "some menu"], prose, 20, 0.08)
    assert by_quota == hold_out.parts_by_quota([*reversed(keys), "some menu"], prose, 20, 0.08)
    for part in (hold_out.DEV, hold_out.TEST):
        count = {name: sum(by_quota.get(key) == part for key in own) for name, own in prose.items()}
        assert 20 <= count["de"] < 30
        assert count["cy"] >= 4
    assert set(by_quota) <= set(lone[150:])


PATTERN = "The {} sees the {}, and the {} is {}."
THINGS = "dog cat bird horse mouse tree house river stone child woman man fish".split()


def test_text_of_one_pattern_is_prepared_and_its_near_twins_are_told(tmp_path):
    every = itertools.product(THINGS, THINGS, THINGS, ("big", "small"))
    english = [PATTERN.format(*chosen) for chosen in itertools.islice(every, 3298)]
    (tmp_path / "own.en").write_text("\n".join(english) + "\n", "utf-8")
    (tmp_path / "own.de").write_text("\n".join(line[::-1] for line in english) + "\n", "utf-8")
    files = (tmp_path / "own.de",)
    told = str(
        prepare(PrepareConfig(output=tmp_path / "out", cache=tmp_path / "cache", sources=(), files=files), quiet)
    )
    text = PreparedText.load(tmp_path / "out")
    pairs = text.manifest["pairs"]
    assert (pairs["test"], pairs["dev"]) == (round(0.03 * 3298), round(0.015 * 3298))
    assert sum(pairs[part] for part in ("train", "dev", "test")) == 3298
    assert f"warning: {pairs['test']} English sentences of the test have a near twin in training" in told
    test = [example.english for example in text.examples()]
    assert text.near_twins(test) == [True] * pairs["test"]
    assert text.near_twins(["Something that is nowhere at all"]) == [False]
    assert text.spelt_in_bytes(text.source_ids("日本語")) > 0.5 > text.spelt_in_bytes(text.source_ids(english[0]))
