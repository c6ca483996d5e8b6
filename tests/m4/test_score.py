"""Scores equal sacrebleu's, language by language."""

from __future__ import annotations

import pytest
import sacrebleu

from gshard_m4 import score

SOURCES = ["Datei speichern unter", "Das Fenster schließen", "Enregistrer le fichier", "Ouvrir une nouvelle fenêtre"]
REFERENCES = ["Save the file as", "Close the window", "Save the file", "Open a new window here"]
WRITTEN = ["Save the file as", "Close this window", "Save a file", "Open a new window here"]
LANGUAGES = ["de", "de", "fr", "fr"]


def test_scores_are_those_of_sacrebleu() -> None:
    counts_NK = score.counted(WRITTEN, REFERENCES)
    for rows in (slice(0, 2), slice(2, 4), slice(0, 4)):
        written, wanted = WRITTEN[rows], [REFERENCES[rows]]
        bleu, chrf = score.points(counts_NK[rows].sum(0))
        assert bleu == pytest.approx(sacrebleu.corpus_bleu(written, wanted).score)
        assert chrf == pytest.approx(sacrebleu.corpus_chrf(written, wanted, word_order=2).score)
    metrics = (sacrebleu.BLEU(), sacrebleu.CHRF(word_order=2))
    for metric in metrics:
        metric.corpus_score(WRITTEN, [REFERENCES])
    bleu, chrf = (metric.get_signature() for metric in metrics)
    assert f"BLEU|{bleu} chrF++|{chrf}" == score.SIGNATURE
    assert "version:" in score.SIGNATURE
    assert "tok:13a" in score.SIGNATURE


def test_baselines_know_no_language() -> None:
    frequent = REFERENCES[2]
    assert frequent == "Save the file"
    systems = {"model": score.counted(WRITTEN, REFERENCES)} | score.baselines(SOURCES, REFERENCES, frequent)
    (_, model), *others = (score.points(counts.sum(0)) for counts in systems.values())
    assert all(model > chrf for _, chrf in others)
    copied, same = (score.points(systems[name][2:].sum(0)) for name in list(systems)[1:])
    assert same[1] > copied[1]
    lines = score.table(systems, LANGUAGES).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["de", "2"], ["fr", "2"], ["all", "4"]]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("cut", [slice(0, 3), slice(0, 0)])
def test_unequal_lengths_are_refused(cut: slice) -> None:
    with pytest.raises(ValueError, match="one reference for each translation"):
        score.counted(WRITTEN[cut], REFERENCES)
