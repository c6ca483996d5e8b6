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
    found = score.score(WRITTEN, REFERENCES, LANGUAGES)
    assert list(found) == ["de", "fr", "all"]
    for language, rows in {"de": slice(0, 2), "fr": slice(2, 4), "all": slice(0, 4)}.items():
        written, wanted = WRITTEN[rows], [REFERENCES[rows]]
        assert found[language].bleu == pytest.approx(sacrebleu.corpus_bleu(written, wanted).score)
        assert found[language].chrf == pytest.approx(sacrebleu.corpus_chrf(written, wanted, word_order=2).score)
    assert found["de"].sentences == 2
    assert "version:" in found["all"].signature
    assert "tok:13a" in found["all"].signature


def test_baselines_know_no_language() -> None:
    frequent = REFERENCES[2]
    assert frequent == "Save the file"
    found = score.baselines(SOURCES, REFERENCES, LANGUAGES, frequent)
    model = score.score(WRITTEN, REFERENCES, LANGUAGES)["all"]
    assert all(model.chrf > scores["all"].chrf for scores in found.values())
    assert found["the most frequent sentence"]["fr"].chrf > found["copy the source"]["fr"].chrf
    lines = score.table({"model": score.score(WRITTEN, REFERENCES, LANGUAGES), **found}).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("cut", [slice(0, 3), slice(0, 0)])
def test_unequal_lengths_are_refused(cut: slice) -> None:
    with pytest.raises(ValueError, match="one reference and one language"):
        score.score(WRITTEN[cut], REFERENCES, LANGUAGES)
