"""One's own text: dev and test files, what is refused, vocabularies that are kept, fine-tuning, and scoring."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from checked_calls import near
from gshard_m4 import checkpoint, prepare, score_command
from gshard_m4.command_line import main
from gshard_m4.config import Run
from gshard_m4.corpus import hold_out
from gshard_m4.corpus.pair import Pair
from gshard_m4.decode import DecodeConfig
from gshard_m4.errors import CorpusError
from gshard_m4.prepare_config import PrepareConfig
from gshard_m4.step import make_evaluation
from gshard_m4.text import PreparedText
from gshard_m4.translate import load

NOUNS = "house garden window teacher river mountain language letter morning kitchen".split()
VERBS = "opens breaks follows remembers answers covers".split()
ENDS = ["every day", "in the rain", "without a word", "before noon"]
ENGLISH = [f"The {a} {v} the {b} {end}." for a, v, b, end in itertools.product(NOUNS, VERBS, NOUNS, ENDS) if a != b]


def write(path, english, language="de"):
    rows = [f"{language}\t{line[:-1][::-1]}.\t{line}" for line in english]
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


def config(folder, **changes):
    given = {"output": folder / "out", "cache": folder / "cache", "sources": (), "tokens": 256, "length": 48}
    return PrepareConfig(**(given | changes))


def quiet(line):
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A prepared corpus and a run of two steps on it."""
    folder = tmp_path_factory.mktemp("own")
    prepare.prepare(config(folder, files=(write(folder / "own.tsv", ENGLISH),)), quiet)
    given = ["--devices", "1", "--steps", "2", "--model-dim", "16", "--hidden-dim", "32", "--layers", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        given += ["--experts", "0", "--data", str(folder / "out"), "--run", str(folder / "run")]
        assert main(["train", *given]) == 0
    return folder


def test_ones_own_dev_and_test_files_are_kept_as_they_are_and_out_of_training(tmp_path):
    dev, test = ENGLISH[7:400:9], [*ENGLISH[3:900:11], "Ok", "100 %"]  # cleaning would leave the last two out
    files = {
        "files": (write(tmp_path / "own.tsv", ENGLISH),),
        "dev_files": (write(tmp_path / "dev.tsv", dev),),
        "test_files": (write(tmp_path / "test.tsv", test), write(tmp_path / "more.tsv", ["Bonjour."], "fr")),
    }
    made = prepare.prepare(config(tmp_path, **files), quiet)
    text = PreparedText.load(tmp_path / "out")
    assert [e.english for e in text._pairs("dev")] == dev
    assert [e.english for e in text._pairs("test")] == test
    held = {hold_out.key(line) for line in (*dev, *test)}
    trained = [hold_out.key(pair.english) for pair in text._pairs("train")]
    assert not held & set(trained)
    assert len(trained) == len(ENGLISH) - len({*dev, *test} & set(ENGLISH))
    assert text.manifest["left_out"]["in your own dev or test text"] == len({*dev, *test} & set(ENGLISH))
    assert text.manifest["pairs"]["test"] == len(test)
    assert "1 lines with a language without training text (fr)" in str(made)
    assert "more.tsv:1\ta language without training text (fr)" in (tmp_path / "out" / "rejected.tsv").read_text()
    assert len(text.held_out()) > 0
    again = prepare.prepare(config(tmp_path, **files), quiet)
    assert again.was_there
    write(tmp_path / "test.tsv", test[:-1])
    assert not prepare.prepare(config(tmp_path, **files), quiet).was_there, "another test is another corpus"


def test_why_not_one_line_is_a_pair(tmp_path):
    (tmp_path / "two.tsv").write_text("Hallo Welt\tHello world\n" * 3 + "xx-unknown\ta b\tc d\n")
    with pytest.raises(CorpusError) as error:
        prepare.prepare(config(tmp_path, files=(tmp_path / "two.tsv",)), quiet)
    told = str(error.value)
    assert "3 lines with 2 fields instead of 3" in told
    assert "two.tsv:1, 2 fields instead of 3" in told
    assert "1 lines with unknown language" in told


def test_vocabularies_are_kept_and_training_goes_on_from_a_run(trained, tmp_path, capsys):
    more = [line.replace("house", "castle") for line in ENGLISH]
    files = (write(tmp_path / "more.tsv", more),)
    changed = config(tmp_path, files=files, vocabularies=trained / "out", length=None)
    prepare.prepare(changed, quiet)
    base, text = PreparedText.load(trained / "out"), PreparedText.load(tmp_path / "out")
    assert (text.fingerprint, text.length) == (base.fingerprint, base.length)
    french = (write(tmp_path / "fr.tsv", more, "fr"),)
    with pytest.raises(CorpusError, match=r"no tag for French(.|\n)*there are de"):
        prepare.prepare(dataclasses.replace(changed, files=french, output=tmp_path / "fr"), quiet)
    with pytest.raises(CorpusError, match="kept or learnt"):
        config(tmp_path, files=files, vocabularies=trained / "out", source_vocabulary=400)

    given = ["train", "--data", str(tmp_path / "out"), "--run", str(tmp_path / "tuned"), "--devices", "1"]
    given += ["--from", str(trained / "run"), "--learning-rate", "1e-9", "--steps", "1"]
    assert main(given) == 0
    assert "begins with the parameters of step 2" in capsys.readouterr().out
    _, old, _ = checkpoint.restore(Run(trained / "run").checkpoints)
    _, new, meta = checkpoint.restore(Run(tmp_path / "tuned").checkpoints)
    assert (int(new["step"]), meta["from"]) == (1, str(trained / "run"))
    near(old["params"], new["params"], 1e-7, 1e-6)
    assert main([*given, "--resume"]) == 0
    told = capsys.readouterr().out
    assert "has taken its 1 steps already: nothing was trained" in told
    assert "nan" not in told

    assert main([*given[:-6], "--run", str(tmp_path / "x"), "--from", str(trained / "run"), "--experts", "4"]) == 2
    assert "leave --experts out" in capsys.readouterr().err
    other = [*given[:2], str(tmp_path / "other"), *given[3:]]
    prepare.prepare(config(tmp_path, files=files, output=tmp_path / "other"), quiet)
    assert main([*other, "--run", str(tmp_path / "y")]) == 2
    assert "--vocabularies" in capsys.readouterr().err


def test_given_translations_are_scored(trained, tmp_path, capsys):
    """As the cross entropy of training counts, whatever stands beside them."""
    translator = load(Run(trained / "run"), PreparedText.load(trained / "out"), DecodeConfig())
    text = translator.text
    pairs = [Pair("de", line[:-1][::-1], line) for line in ENGLISH[:5]]
    found, cut = score_command.nats(translator, pairs, batch=4)
    assert cut == 0
    sides = np.zeros((2, 5, 64), np.int32)
    for row, pair in enumerate(pairs):
        for side, ids in enumerate((text.source_ids(pair.foreign), text.target_ids(pair.english))):
            sides[side, row, : len(ids) + 1] = [*ids, 1]
    evaluate = jax.jit(make_evaluation(translator.model))
    mean, tokens = evaluate(translator.params, {"source": sides[0], "target": sides[1]})
    assert sum(count for _, count in found) == tokens
    assert sum(value for value, _ in found) == pytest.approx(float(mean * tokens), rel=1e-5)
    for pair, (value, _) in zip(pairs, found, strict=True):
        ((alone, _),), _ = score_command.nats(translator, [pair], batch=4)
        assert alone == pytest.approx(value, rel=1e-5), "whatever stands beside it"

    write(tmp_path / "pairs.tsv", [*ENGLISH[:3], " ".join(ENGLISH[:4])])
    given = ["score", str(tmp_path / "pairs.tsv"), "--run", str(trained / "run"), "--batch", "4"]
    assert main([*given, "--output", str(tmp_path / "scores.tsv")]) == 0
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()]
    assert len(rows) == 4
    assert all(float(value) > 0 and int(tokens) > 3 for value, tokens in rows)
    told = capsys.readouterr().err
    assert "4 pairs" in told
    assert "of 1 sources only the beginning of 47 tokens was read" in told
    (tmp_path / "pairs.tsv").write_text("de\ta b\tc d\nonly one\n")
    assert main(given) == 2
    assert "1 of 2 lines are no pairs" in capsys.readouterr().err
