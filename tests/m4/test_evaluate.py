"""Evaluations: scores equal sacrebleu's, the same sentences are compared, and tables say what was measured."""

import csv
import json

import pytest
import sacrebleu

from gshard_m4 import score
from gshard_m4.by_class import Scored, summary
from gshard_m4.corpus.pair import Pair
from gshard_m4.evaluation_files import EvaluateError, Line, joined, lines_of, read_lines, save
from gshard_m4.score import counted, is_near_copy, points
from gshard_m4.significance import SAMPLES, compare, holm

EXAMPLES = [
    Pair(language, f"{language} {n}", f"open the file number {n} of the new window {language}")
    for language in ("de", "fr", "gd", "yo")
    for n in range(3)
]
WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("ale", "orn", "int", "ush", "eck", "ode", "arf")]
"""Different words: sentences that differ in one of these are different English sentences."""
PAIRS = {"yo": 10, "de": 5000, "gd": 10, "fr": 900}


def written(spoilt):
    """Translations of which the first ``spoilt`` of each language are wrong."""
    return [e.english if n % 3 >= spoilt else e.english.replace("file number", "door") for n, e in enumerate(EXAMPLES)]


def scored(examples, lines, pairs=PAIRS, theirs=()):
    return Scored(examples, counted(lines, [e.english for e in examples]), pairs, theirs)


def saved(folder, of, lines):
    languages = of.by_language()
    save(folder, {"name": "model"}, of, lines, languages, of.by_class())
    return languages


def test_languages_are_ordered_by_their_training_pairs():
    found = scored(EXAMPLES, written(1))
    assert list(found.classes.items()) == [("de", "high"), ("fr", "medium"), ("gd", "medium"), ("yo", "low")]
    rows = {row.resource: row for row in found.by_language()}
    assert list(rows) == ["de", "fr", "gd", "yo"]
    of_fr = [i for i, e in enumerate(EXAMPLES) if e.language == "fr"]
    want = sacrebleu.corpus_bleu([written(1)[i] for i in of_fr], [[EXAMPLES[i].english for i in of_fr]]).score
    assert (rows["fr"].bleu, rows["fr"].most) == (pytest.approx(want), PAIRS["fr"])


def test_differences_are_of_the_same_sentences_only(tmp_path):
    worse = scored(EXAMPLES, written(2))
    saved(tmp_path, worse, written(2))
    read = read_lines(tmp_path)
    assert read == lines_of(EXAMPLES, written(2))
    theirs = joined(EXAMPLES, {"worse": read})
    assert theirs == written(2)
    rows = scored(EXAMPLES, written(1), theirs=theirs).by_language()
    for better, other in zip(rows, worse.by_language(), strict=True):
        assert better.delta_bleu == better.bleu - other.bleu > 0
        assert better.delta_chrf == better.chrf - other.chrf > 0
    only_de, only_fr = ([line for line in read if line.language == code] for code in ("de", "fr"))
    parts = joined(EXAMPLES, {"fr": only_fr, "de": only_de, "more": [Line("xx", "a", "b", "c")]})
    assert parts == [line if e.language in ("de", "fr") else None for e, line in zip(EXAMPLES, written(2))]
    with pytest.raises(EvaluateError, match="two baselines have the language de"):
        joined(EXAMPLES, {"worse": read, "de": only_de})
    other = [e._replace(foreign=e.foreign + "!") for e in EXAMPLES]
    assert joined(EXAMPLES[1:], {"more": read}) == written(2)[1:]
    for lines in (lines_of(other, written(2)), read[1:]):
        with pytest.raises(EvaluateError, match="scores of de are not of the same sentences"):
            joined(EXAMPLES, {"other": lines})


@pytest.mark.parametrize("content", [None, "two\tfields\n", "more\tthan\tfour\tfields\tare\n"])
def test_what_is_no_file_of_translations_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "translations.tsv").write_text(content)
    with pytest.raises(EvaluateError, match="no translations"):
        read_lines(tmp_path)


def test_blanks_and_line_ends_do_not_part_a_baseline_from_its_sentences(tmp_path):
    examples = [Pair("de", "a\tb\u2028c", "open  the\x85file")]
    saved(tmp_path, scored(examples, ["open\nthe file"]), ["open\nthe file"])
    assert joined(examples, {"one": read_lines(tmp_path)}) == ["open the file"]
    for one, other in (("open\nthe file", "open the file"), ("open \u00a0the  file ", "open the file")):
        assert (counted([one], ["open the file now"]) == counted([other], ["open the file now"])).all()


def test_table_and_summary(tmp_path):
    theirs = [line if e.language in ("de", "gd") else None for e, line in zip(EXAMPLES, written(2))]
    of = scored(EXAMPLES, written(1), theirs=theirs)
    languages = saved(tmp_path, of, written(1))
    with (tmp_path / "scores.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["class"] for row in table] == ["high", "medium", "medium", "low"]
    assert [bool(row["delta_bleu"]) for row in table] == [True, False, True, False]
    assert float(table[0]["delta_bleu"]) == pytest.approx(languages[0].delta_bleu, abs=0.005)
    results = json.loads((tmp_path / "results.json").read_text())
    found = {code: (of["pairs"], of["sentences"]) for code, of in results["languages"].items()}
    assert found == {code: (pairs, 3) for code, pairs in PAIRS.items()}
    assert (results["name"], results["overall"]) == ("model", points(of.counts_NK.sum(0)).tolist())


def test_what_is_more_than_chance(tmp_path):
    english = [f"open the file number {word} of the window" for word in WORDS[:40]]
    examples = [Pair(code, "x", line) for code in ("de", "yo") for line in english]
    right = [e.english for e in examples]
    # Worse in one language, and as often better as worse in the other.
    theirs = [line.replace("file number", "door") if e.language == "de" else line for e, line in zip(examples, right)]
    theirs = [line.replace("open", "shut") if n % 2 and n >= 40 else line for n, line in enumerate(theirs)]
    ours = [line.replace("open", "shut") if n % 2 == 0 and n >= 40 else line for n, line in enumerate(right)]
    of_de, of_yo = saved(tmp_path, scored(examples, ours, theirs=theirs), ours)
    assert of_de.p_bleu < 0.01 < 0.1 < of_yo.p_bleu
    assert of_de.bleu_95 == 0.0 < of_yo.bleu_95
    assert scored(examples, ours).by_language()[1].p_bleu is None


def compared(english, ours, theirs):
    return compare(english, counted(ours, english), counted(theirs, english))


def test_one_english_sentence_in_many_languages_is_one_cluster():
    """A difference in a few sentences, which many languages have, is less sure than in as many different sentences."""
    english = [f"open the file {word} of the window" for word in WORDS[:40]]
    worse = [line.replace("file", "door") if n < 6 else line for n, line in enumerate(english)]
    better = [line.replace("open", "shut") if n == 20 else line for n, line in enumerate(english)]
    once = compared(english, better, worse)
    four_times = compared(english * 4, better * 4, worse * 4)
    assert once.english == four_times.english == 40
    assert (once.p, once.half) == (four_times.p, four_times.half), "as sure as from one language"
    apart = [f"{line} {code}" for code in ("one", "two", "three", "four") for line in english]
    others = [[f"{line} {code}" for code in ("one", "two", "three", "four") for line in of] for of in (better, worse)]
    alone = compared(apart, *others)
    assert alone.english == 160
    assert alone.half[0] < 0.7 * four_times.half[0]
    assert alone.p[0] < four_times.p[0]


def test_a_p_is_two_sided_and_right_under_chance(rng):
    """Systems that err alike: a p that is the same whichever is called ours."""
    english = [f"open the file {word} of the {other} now" for word in WORDS for other in ("window", "house")]
    one, other = ([line.replace("file", "door") if rng.random() < 0.3 else line for line in english] for _ in "ab")
    _, found = compared(english, one, other).p
    assert found == compared(english, other, one).p[1] > 0.05
    few = compared(english[:9], english[:9], ["x"] * 9)
    assert (few.p, few.delta[0]) == ((None, None), pytest.approx(100)), "there is none for a handful of sentences"
    assert compared(english[:20], english[:20], ["x"] * 20).p[0] == 1 / (1 + SAMPLES)
    for chances, corrected in (
        ([], []), ([0.2], [0.2]), ([0.4, 0.3], [0.6, 0.6]), ([None, 0.01, 0.02], [None, 0.02, 0.02]),
        ([0.9] * 3, [1] * 3),
    ):  # fmt: skip
        assert holm(chances) == pytest.approx(corrected)


def test_classes_are_scored_as_one_text(tmp_path):
    examples = [Pair(f"l{n % 8}", "x", f"open the file number {WORDS[n]} of the window {n * n}") for n in range(80)]
    pairs = {f"l{n}": 1000 - n for n in range(8)}  # l0 and l1 are high, l6 and l7 low
    right = [e.english for e in examples]
    ours = [line.replace("open", "shut") if e.language in ("l6", "l7") else line for e, line in zip(examples, right)]
    worse = [line.replace("file", "door") if e.language in ("l0", "l7") else line for e, line in zip(examples, ours)]
    # A baseline that was not trained on one language.
    theirs = [None if e.language == "l1" else line for e, line in zip(examples, worse, strict=True)]
    of = scored(examples, ours, pairs, theirs)
    rows = {row.resource: row for row in of.by_class()}
    assert {name: (row.languages, row.sentences, row.compared) for name, row in rows.items()} == {
        "high": (2, 20, 1), "medium": (4, 40, 4), "low": (2, 20, 2), "all": (8, 80, 7)
    }  # fmt: skip
    low = [n for n, e in enumerate(examples) if e.language in ("l6", "l7")]
    bleu = sacrebleu.corpus_bleu([ours[n] for n in low], [[right[n] for n in low]]).score
    assert rows["low"].bleu == pytest.approx(bleu)
    other = sacrebleu.corpus_bleu([worse[n] for n in low], [[right[n] for n in low]]).score
    assert bleu > other
    assert rows["low"].delta_bleu == pytest.approx(bleu - other)
    assert rows["high"].p_bleu < 0.05
    assert (rows["medium"].delta_bleu, rows["medium"].p_bleu, rows["high"].english) == (0.0, 1.0, 20)
    family = [p for row in rows.values() for p in (row.p_bleu, row.p_chrf)]
    corrected = [p for row in rows.values() for p in (row.p_bleu_holm, row.p_chrf_holm)]
    assert corrected == holm(family)
    told = summary(list(rows.values()), "dense").splitlines()
    assert "better than dense" in told[0]
    assert told[1].endswith("languages compared: 1")
    saved(tmp_path, of, ours)
    with (tmp_path / "classes.csv").open() as file:
        assert [row["resource"] for row in csv.DictReader(file)] == ["high", "medium", "low", "all"]


@pytest.mark.parametrize(("source", "english", "near"), [
    ("Python 3.11 installieren", "Install Python 3.11", True), ("{name} wurde gelöscht", "{name} was deleted", False),
    ("Datei %(name)s", "%(name)s file", True), ("OPEN the FILE", "open the file", True),
    ("Datei öffnen", "Open file", False), ("", "Open file", False), ("Datei", "…", False),
])  # fmt: skip
def test_near_copies(source, english, near):
    assert is_near_copy(source, english) == near


def test_figure(tmp_path):
    figure = pytest.importorskip("gshard_m4.figure", reason="matplotlib (the extra plot) is not installed")
    many = [Pair(f"l{n:02}", "x", f"open the new file {n}") for n in range(40)]
    right = [e.english for e in many]
    pairs = {e.language: 10_000 // (n + 1) for n, e in enumerate(many)}
    for theirs, deltas in ((["nothing"] * 40, True), ((), False)):
        of = scored(many, right, pairs, theirs)
        rows = of.by_language()
        for name in ("one", "again"):
            figure.figure(tmp_path / f"{name}.svg", "model", rows, of.classes, "bilingual")
        drawn = (tmp_path / "one.svg").read_text()
        assert drawn == (tmp_path / "again.svg").read_text(), "the same results give the same file"
        assert ("BLEU above bilingual" in drawn) == deltas
        assert drawn.index("l00") < drawn.index("l20") < drawn.index("l39")


REFERENCES = ["Save the file as", "Close the window", "Save the file", "Open a new window here"]
WRITTEN = ["Save the file as", "Close this window", "Save a file", "Open a new window here"]


def test_scores_are_those_of_sacrebleu():
    counts_NK = score.counted(WRITTEN, REFERENCES)
    for rows in (slice(0, 2), slice(0, 4)):
        written, wanted = WRITTEN[rows], [REFERENCES[rows]]
        bleu, chrf = score.points(counts_NK[rows].sum(0))
        assert bleu == pytest.approx(sacrebleu.corpus_bleu(written, wanted).score)
        assert chrf == pytest.approx(sacrebleu.corpus_chrf(written, wanted, word_order=2).score)
    metrics = (sacrebleu.BLEU(), sacrebleu.CHRF(word_order=2))
    for metric in metrics:
        metric.corpus_score(WRITTEN, [REFERENCES])
    bleu, chrf = (metric.get_signature() for metric in metrics)
    assert f"BLEU|{bleu} chrF++|{chrf}" == score.SIGNATURE
    with pytest.raises(ValueError, match="one reference for each translation"):
        score.counted(WRITTEN[:3], REFERENCES)
