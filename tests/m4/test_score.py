"""Scores equal sacrebleu's, language by language."""

import pytest
import sacrebleu

from gshard_m4 import score

SOURCES = ["Datei speichern unter", "Das Fenster schließen", "Enregistrer le fichier", "Ouvrir une nouvelle fenêtre"]
REFERENCES = ["Save the file as", "Close the window", "Save the file", "Open a new window here"]
WRITTEN = ["Save the file as", "Close this window", "Save a file", "Open a new window here"]
LANGUAGES = ["de", "de", "fr", "fr"]


def test_scores_are_those_of_sacrebleu():
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


def test_systems_are_side_by_side():
    systems = {"model": score.counted(WRITTEN, REFERENCES), "copy": score.counted(SOURCES, REFERENCES)}
    lines = score.table(systems, LANGUAGES).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["de", "2"], ["fr", "2"], ["all", "4"]]
    assert len({len(line) for line in lines}) == 1
    assert all(float(line.split()[3]) > float(line.split()[5]) for line in lines[1:]), "who copies knows no language"


@pytest.mark.parametrize("cut", [slice(0, 3), slice(0, 0)])
def test_unequal_lengths_are_refused(cut):
    with pytest.raises(ValueError, match="one reference for each translation"):
        score.counted(WRITTEN[cut], REFERENCES)
