"""Known English: what is kept out of a language is not told by its training text, and stays in others."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from gshard_m4.corpus.hold_out import key
from gshard_m4.corpus.known_english import KNOWN_DEV, KNOWN_TEST, OTHERS, units
from gshard_m4.corpus.part import PARTS, Split, write_parts
from gshard_m4.prepare import PrepareConfig, fitting, prepare
from gshard_m4.text import PreparedText

WORDS = [a + b for a in ("ba", "ke", "lo", "mi", "du", "ra") for b in ("nat", "sor", "tel", "vim", "gus")]
LANGUAGES = ("de", "fr", "nb", "nn", "th")


def foreign(language, words):
    """Another spelling in each language; the two Norwegians often agree, and Thai puts no blanks."""
    if language == "th":
        return "".join(chr(0x0E01 + WORDS.index(word)) + chr(0x0E30) for word in words)
    ending = {"de": "en", "fr": "er", "nb": "et", "nn": "et"}[language]
    return " ".join(word[::-1] + (ending if language != "nn" or word[0] != "b" else "a") for word in words)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    said = [[WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(2, 7))] for _ in range(600)]
    said += [[*words[:-1], WORDS[n % 30]] for n, words in enumerate(said[:200])]  # near twins
    found = {}
    for number, language in enumerate(LANGUAGES):
        found[language] = folder / f"{language}.tsv"
        lines = []
        for n, words in enumerate(said):
            if (n * 7 + number) % 4:  # no language has everything
                lines.append(f"{foreign(language, words)}\t{' '.join(words)}")
            if n % 5 == number:
                lines.append(f"{foreign(language, words)} {n}!\t{' '.join(words).capitalize()} {n}.")
        found[language].write_text("".join(line + "\n" for line in dict.fromkeys(lines)), encoding="utf-8")
    return found


def pairs(folder, part):
    for line in (folder / f"{part}.tsv").read_text(encoding="utf-8").splitlines():
        language, source, english = line.split("\t")
        yield language, source, english


def split(files, folder, known=10):
    folder.mkdir()
    return write_parts(files, folder, Split(0.02, 0.02, 0, known, most_known=0.05), folder / "aside.gz")


def test_what_is_kept_out_is_not_told_by_the_training_text(files, tmp_path):
    found = split(files, tmp_path / "out")
    train = list(pairs(tmp_path / "out", "train"))
    has = {}
    for language, _, english in train:
        has.setdefault(key(english), set()).add(language)
    sources = {tuple(units(source)) for _, source, _ in train}
    by_language = {language: [] for language in files}
    for language, source, _ in train:
        by_language[language].append(units(source))

    def runs(own, length):
        return {tuple(own[i : i + length]) for i in range(len(own) - length + 1)}

    kept_out = [(part, *pair) for part in (KNOWN_DEV, KNOWN_TEST) for pair in pairs(tmp_path / "out", part)]
    assert {language for _, language, _, _ in kept_out} == set(LANGUAGES)
    for _, language, source, english in kept_out:
        assert language not in has[key(english)], "the pair is new"
        assert len(has[key(english)]) >= OTHERS, "its English is not"
        assert tuple(units(source)) not in sources
        length = min(3, len(units(source)))
        mine = runs(units(source), length)
        if length > 1:
            assert max(len(mine & runs(other, length)) for other in by_language[language]) < len(mine) / 2
    parts = {language: {part for part, own, _, _ in kept_out if own == language} for language in files}
    assert all(len(of) == 2 for of in parts.values()), "for dev and for the test"
    for one, other in itertools.combinations(PARTS, 2):
        assert not set(pairs(tmp_path / "out", one)) & set(pairs(tmp_path / "out", other))
    lines = {language: path.read_text(encoding="utf-8").count("\n") for language, path in files.items()}
    assert sum(lines.values()) == sum(found["pairs"].values()), "every pair is in one part"
    assert units("Ouvrir %s fichier 3") == ["ouvrir", "fichier"]
    assert units("打开文件 PDF") == ["打", "开", "文", "件", "pdf"]


def test_the_choice_follows_from_hashes(files, tmp_path):
    split(files, tmp_path / "one")
    split(dict(reversed(files.items())), tmp_path / "other")
    one, other = ({part: set(pairs(tmp_path / of, part)) for part in PARTS} for of in ("one", "other"))
    assert one["test"] == other["test"]
    shared = len(one[KNOWN_TEST] & other[KNOWN_TEST])
    assert shared > 0.8 * len(one[KNOWN_TEST]), "who comes first may matter where two want the same sentence"
    assert split(files, tmp_path / "again") == split(files, tmp_path / "and_again")
    split(files, tmp_path / "none", known=0)
    assert not list(pairs(tmp_path / "none", KNOWN_TEST))


@pytest.fixture
def config(files, tmp_path):
    mine = tmp_path / "mine.tsv"
    with mine.open("w", encoding="utf-8") as out:
        for language, path in files.items():
            out.writelines(f"{language}\t{line}" for line in path.read_text(encoding="utf-8").splitlines(keepends=True))
    return PrepareConfig(
        output=tmp_path / "out", cache=tmp_path / "cache", sources=(), files=(mine,), source_vocabulary=400,
        target_vocabulary=330, dev=0.05, test=0.05,
    )  # fmt: skip


def test_a_prepared_corpus_has_both_tests(config):
    done = str(prepare(config, lambda line: None))
    text = PreparedText.load(config.folder)
    assert "known English: " in done
    assert text.has(KNOWN_TEST)
    known = text.examples(1000, KNOWN_TEST)
    assert {tuple(e) for e in known} <= set(pairs(config.folder, KNOWN_TEST))
    few = text.examples(1000, KNOWN_TEST, each=3)
    assert len(few) == 3 * len(LANGUAGES)
    assert set(few) <= set(known)
    assert text.held_out(KNOWN_DEV)[0]["source"].shape == text.held_out()[0]["source"].shape
    assert "warning" not in done
    lengths = text.batches.data.lengths
    assert text.length == fitting(lengths, 24, 128) > 24, "rows are as long as the text of one's own needs"
    assert (lengths <= text.length).mean() >= 0.99

    # A corpus of an earlier version stays.
    path = config.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["format"] = 3
    for part in (KNOWN_DEV, KNOWN_TEST):
        del manifest["pairs"][part]
        (config.folder / f"{part}.tsv").unlink()
    path.write_text(json.dumps(manifest))
    stamp = path.stat().st_mtime_ns
    again = prepare(config, lambda line: None)
    assert again.was_there
    assert path.stat().st_mtime_ns == stamp, "its runs need its vocabularies"
    assert "another version prepared this corpus: it stays as it is" in str(again)
    text = PreparedText.load(config.folder)
    assert not text.has(KNOWN_TEST)
    assert text.examples(10, KNOWN_TEST) == []
    assert text.held_out(KNOWN_DEV) == ()
    assert len(text.examples(10)) == 10


def test_one_language_has_no_known_english(config, tmp_path):
    only = tmp_path / "only.tsv"
    lines = config.files[0].read_text(encoding="utf-8").splitlines(keepends=True)
    only.write_text("".join(line for line in lines if line.startswith("de\t")), encoding="utf-8")
    alone = dataclasses.replace(config, files=(only,), source_vocabulary=330)
    done = str(prepare(alone, lambda line: None))
    assert "no second test" in done
    assert "warning: test has" in done, "a small test is no test"
