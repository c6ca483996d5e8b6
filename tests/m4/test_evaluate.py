"""Evaluations: what is compared is of the same sentences, and tables and figures say what was measured."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from gshard_m4 import by_class, evaluate, evaluation_files, near_copies, significance
from gshard_m4.corpus.pair import Pair
from gshard_m4.evaluate import EvaluateError, Results
from gshard_m4.significance import SAMPLES, compare, holm

EXAMPLES = [
    Pair(language, f"{language} {n}", f"open the file number {n} of the new window {language}")
    for language in ("de", "fr", "gd", "yo")
    for n in range(3)
]
WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("ale", "orn", "int", "ush", "eck", "ode", "arf")]
"""Different words: sentences that differ in one of these are different English sentences."""
PAIRS = {"yo": 10, "de": 5000, "gd": 10, "fr": 900}


def written(spoilt: int) -> list[str]:
    """Translations of which the first ``spoilt`` of each language are wrong."""
    return [e.english if n % 3 >= spoilt else e.english.replace("file number", "door") for n, e in enumerate(EXAMPLES)]


def test_languages_are_ordered_by_their_training_pairs() -> None:
    found = evaluate.measure("run", EXAMPLES, written(1), PAIRS)
    assert list(found.languages) == ["de", "fr", "gd", "yo"]
    assert evaluate.resource_classes(found) == {"de": "high", "fr": "medium", "gd": "medium", "yo": "low"}
    of_fr = [i for i, e in enumerate(EXAMPLES) if e.language == "fr"]
    want = sacrebleu.corpus_bleu([written(1)[i] for i in of_fr], [[EXAMPLES[i].english for i in of_fr]]).score
    assert found.languages["fr"].bleu == pytest.approx(want)


def test_differences_are_of_the_same_sentences_only(tmp_path: Path) -> None:
    better, worse = (evaluate.measure(str(n), EXAMPLES, written(n), PAIRS) for n in (1, 2))
    worse.save(tmp_path)
    read = Results.load(tmp_path)
    assert read == worse
    deltas = evaluate.differences(better, [read])
    for code, (bleu, chrf) in deltas.items():
        assert bleu == better.languages[code].bleu - worse.languages[code].bleu > 0
        assert chrf == better.languages[code].chrf - worse.languages[code].chrf > 0
    only_de, only_fr = (dataclasses.replace(worse, name=c, languages={c: worse.languages[c]}) for c in ("de", "fr"))
    assert evaluate.differences(better, [only_fr, only_de]) == {c: deltas[c] for c in ("fr", "de")}
    with pytest.raises(EvaluateError, match="two baselines have the language de"):
        evaluate.differences(better, [worse, only_de])
    other = [e._replace(foreign=e.foreign + "!") for e in EXAMPLES]
    with pytest.raises(EvaluateError, match="scores of de are not of the same sentences"):
        evaluate.differences(better, [evaluate.measure("other", other, written(2), PAIRS)])
    with pytest.raises(EvaluateError, match="computed differently"):
        evaluate.differences(better, [dataclasses.replace(worse, signature="BLEU|tok:char")])


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "nonsense", '{"format": 2}', '{"format": 1, "languages": {"de": {"bleu": 1}}}']
)
def test_what_is_no_file_of_results_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(EvaluateError, match="no file of results"):
        Results.load(tmp_path)


def test_table_and_summary(tmp_path: Path) -> None:
    better, worse = (evaluate.measure(str(n), EXAMPLES, written(n), PAIRS) for n in (1, 2))
    worse = dataclasses.replace(worse, languages={c: worse.languages[c] for c in ("de", "gd")})
    deltas = evaluate.differences(better, [worse])
    languages = by_class.by_language(better, EXAMPLES, written(1), deltas=deltas)
    evaluation_files.save(tmp_path, better, EXAMPLES, written(1), languages)
    with (tmp_path / "scores.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["class"] for row in table] == ["high", "medium", "medium", "low"]
    assert [bool(row["delta_bleu"]) for row in table] == [True, False, True, False]
    assert float(table[0]["delta_bleu"]) == pytest.approx(deltas["de"][0], abs=0.005)
    assert json.loads((tmp_path / "results.json").read_text())["signature"] == better.signature


def test_what_is_more_than_chance(tmp_path: Path) -> None:
    examples = [
        Pair(code, "x", f"open the file number {WORDS[n]} of the window") for code in ("de", "yo") for n in range(40)
    ]
    right = [e.english for e in examples]
    # Worse in one language, and as often better as worse in the other.
    theirs = [line.replace("file number", "door") if e.language == "de" else line for e, line in zip(examples, right)]
    theirs = [line.replace("open", "shut") if n % 2 and n >= 40 else line for n, line in enumerate(theirs)]
    ours = [line.replace("open", "shut") if n % 2 == 0 and n >= 40 else line for n, line in enumerate(right)]
    results, baseline = (evaluate.measure(name, examples, w, PAIRS) for name, w in (("a", ours), ("b", theirs)))
    evaluation_files.save(tmp_path, baseline, examples, theirs)
    read = evaluation_files.read_translations(tmp_path)
    assert [line for own in read.values() for line in own] == theirs
    languages = by_class.by_language(results, examples, ours, read)
    of_de, of_yo = languages
    assert of_de.p_bleu is not None
    assert of_yo.p_bleu is not None
    assert of_de.p_bleu < 0.01 < 0.1 < of_yo.p_bleu
    assert of_de.bleu_95 == 0.0 < of_yo.bleu_95
    deltas = evaluate.differences(results, [baseline])
    for of in languages:
        assert (of.delta_bleu, of.delta_chrf) == pytest.approx(deltas[of.resource])
    assert languages == by_class.by_language(results, examples, ours, read, deltas)
    evaluation_files.save(tmp_path, results, examples, ours, languages)
    with (tmp_path / "scores.csv").open() as file:
        de, yo = csv.DictReader(file)
    assert float(de["p_bleu"]) < 0.01
    assert float(yo["bleu_95"]) > 0
    assert by_class.by_language(results, examples, ours)[1].p_bleu is None
    assert evaluation_files.read_translations(tmp_path / "nowhere") == {}
    (tmp_path / "translations.tsv").write_text("two\tfields\n")
    with pytest.raises(EvaluateError, match="no translations"):
        evaluation_files.read_translations(tmp_path)


def test_one_english_sentence_in_many_languages_is_one_cluster() -> None:
    """A difference in a few sentences, which many languages have, is less sure than in as many different sentences."""
    english = [f"open the file {word} of the window" for word in WORDS[:40]]
    worse = [line.replace("file", "door") if n < 6 else line for n, line in enumerate(english)]
    better = [line.replace("open", "shut") if n == 20 else line for n, line in enumerate(english)]
    once = compare(english, better, worse)
    four_times = compare(english * 4, better * 4, worse * 4)
    assert once.english == four_times.english == 40
    assert (once.bleu_p, once.bleu) == (four_times.bleu_p, four_times.bleu), "as sure as from one language"
    apart = [f"{line} {code}" for code in ("one", "two", "three", "four") for line in english]
    others = [[f"{line} {code}" for code in ("one", "two", "three", "four") for line in of] for of in (better, worse)]
    alone = compare(apart, *others)
    assert alone.english == 160
    assert alone.bleu < 0.7 * four_times.bleu
    assert alone.bleu_p < four_times.bleu_p


@pytest.mark.parametrize("times", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_a_p_is_two_sided_and_right_under_chance(times: int, rng: np.random.Generator) -> None:
    """Of systems that err alike, one in twenty has a p below 0.05; and it is the same whichever is called ours."""
    english = [f"open the file {word} of the {other} now" for word in WORDS for other in ("window", "house")]
    below = 0
    for _ in range(times):
        one, other = ([line.replace("file", "door") if rng.random() < 0.3 else line for line in english] for _ in "ab")
        found = compare(english, one, other).chrf_p
        assert found is not None
        assert found == compare(english, other, one).chrf_p
        below += found < 0.05
    assert below <= 8


def test_there_is_no_p_for_a_handful_of_sentences() -> None:
    english = [f"open the file {word}" for word in WORDS[:9]]
    assert compare(english, english, ["x"] * 9).bleu_p is None
    assert compare([*english, "one more"], [*english, "one more"], ["x"] * 10).bleu_p == 1 / (1 + SAMPLES)


def test_samples_are_scored_as_sacrebleu_scores_texts() -> None:
    """The sum of the counts of clusters is the count of the text."""
    references = [f"open the file {word} of the window" for word in WORDS[:20]] * 2
    written = [line.replace("file", "door") if n % 3 else line for n, line in enumerate(references)]
    cluster_N, count = significance._clusters(references)
    draws_SC = np.ones((1, count), np.int64)
    for metric in (sacrebleu.BLEU(), sacrebleu.CHRF(word_order=2)):
        scores_S, whole = significance._samples(metric, written, references, cluster_N, draws_SC)
        want = metric.corpus_score(written, [references]).score
        assert scores_S[0] == whole == pytest.approx(want)


@pytest.mark.parametrize(
    ("chances", "corrected"),
    [
        ([], []),
        ([0.2], [0.2]),
        ([0.4, 0.3], [0.6, 0.6]),
        ([None, 0.01, 0.02], [None, 0.02, 0.02]),
        ([0.9] * 3, [1] * 3),
    ],
)
def test_holm(chances: list[float | None], corrected: list[float | None]) -> None:
    assert holm(chances) == pytest.approx(corrected)


def test_classes_are_scored_as_one_text(tmp_path: Path) -> None:
    examples = [
        Pair(f"l{n % 8}", "x", f"open the file number {WORDS[n]} of the window {n * n}") for n in range(80)
    ]  # l0 to l1 are high, l6 to l7 low
    pairs = {f"l{n}": 1000 - n for n in range(8)}
    right = [e.english for e in examples]
    ours = [line.replace("open", "shut") if e.language in ("l6", "l7") else line for e, line in zip(examples, right)]
    worse = [line.replace("file", "door") if e.language in ("l0", "l7") else line for e, line in zip(examples, ours)]
    results = evaluate.measure("a", examples, ours, pairs)
    theirs: dict[str, list[str]] = {}
    for example, line in zip(examples, worse, strict=True):
        if example.language != "l1":  # a baseline that was not trained on it
            theirs.setdefault(example.language, []).append(line)
    rows = {row.resource: row for row in by_class.by_class(results, examples, ours, theirs)}
    assert {name: (row.languages, row.sentences, row.compared) for name, row in rows.items()} == {
        "high": (2, 20, 1), "medium": (4, 40, 4), "low": (2, 20, 2), "all": (8, 80, 7)
    }  # fmt: skip
    low = [n for n, e in enumerate(examples) if e.language in ("l6", "l7")]
    bleu = sacrebleu.corpus_bleu([ours[n] for n in low], [[right[n] for n in low]]).score
    assert rows["low"].bleu == pytest.approx(bleu)
    other = sacrebleu.corpus_bleu([worse[n] for n in low], [[right[n] for n in low]]).score
    assert bleu > other
    assert rows["low"].delta_bleu == pytest.approx(bleu - other)
    assert rows["high"].p_bleu is not None
    assert rows["high"].p_bleu < 0.05
    assert rows["medium"].delta_bleu == 0.0
    assert rows["medium"].p_bleu == 1.0
    assert rows["high"].english == 20
    family = [p for row in rows.values() for p in (row.p_bleu, row.p_chrf)]
    corrected = [p for row in rows.values() for p in (row.p_bleu_holm, row.p_chrf_holm)]
    assert corrected == holm(family)
    told = by_class.summary(list(rows.values()), "dense").splitlines()
    assert "better than dense" in told[0]
    assert told[1].endswith("languages compared: 1")
    evaluation_files.save(tmp_path, results, examples, ours, (), list(rows.values()))
    with (tmp_path / "classes.csv").open() as file:
        assert [row["resource"] for row in csv.DictReader(file)] == ["high", "medium", "low", "all"]


@pytest.mark.parametrize(
    ("source", "english", "near"),
    [
        ("Python 3.11 installieren", "Install Python 3.11", True),
        ("{name} wurde gelöscht", "{name} was deleted", False),
        ("Datei %(name)s", "%(name)s file", True),
        ("OPEN the FILE", "open the file", True),
        ("Datei öffnen", "Open file", False),
        ("", "Open file", False),
        ("Datei", "…", False),
    ],
)
def test_near_copies(source: str, english: str, near: bool) -> None:
    assert near_copies.is_near_copy(source, english) == near


def test_why_copying_scores_what_it_scores() -> None:
    sources, references = ["Python 3", "aaa", "Django 5"], ["Python 3", "one two", "Django 5"]
    told = near_copies.told(sources, references, ["Python 2", "one two", "Django 5"])
    assert told.startswith("2 of 3 sentences are near copies, with half of their English words in the source: BLEU ")
    copying = told.splitlines()[1]
    assert copying.startswith("copying the source: BLEU ")
    assert "chrF++ 100.0 on these" in copying
    assert copying.endswith("chrF++ 0.0 on the other 1.")
    assert near_copies.told(["eins"], ["one"], ["one"]).startswith("0 of 1 sentences are near copies")


def test_figure(tmp_path: Path) -> None:
    figure = pytest.importorskip("gshard_m4.figure", reason="matplotlib (the extra plot) is not installed")
    many = [Pair(f"l{n:02}", "x", f"open the new file {n}") for n in range(40)]
    right = [e.english for e in many]
    pairs = {e.language: 10_000 // (n + 1) for n, e in enumerate(many)}
    results = evaluate.measure("model", many, right, pairs)
    zero = evaluate.measure("bilingual", many, ["nothing"] * 40, pairs)
    for name, deltas in (("with", evaluate.differences(results, [zero])), ("without", {})):
        figure.figure(tmp_path / f"{name}.svg", results, deltas, "bilingual")
        drawn = (tmp_path / f"{name}.svg").read_text()
        figure.figure(tmp_path / "again.svg", results, deltas, "bilingual")
        assert drawn == (tmp_path / "again.svg").read_text(), "the same results give the same file"
        assert ("BLEU above bilingual" in drawn) == bool(deltas)
        assert drawn.index("l00") < drawn.index("l20") < drawn.index("l39")
