"""The command line end to end on a made-up language, and how it tells what is wrong."""

import csv
import dataclasses
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest

from gshard_m4 import checkpoint, commands, compilation_cache, demo_command, lines, planned, runs
from gshard_m4.command_line import main
from gshard_m4.config import Run, TrainConfig
from gshard_m4.corpus.pair import Pair
from gshard_m4.decode import DecodeConfig
from gshard_m4.errors import OptionError
from gshard_m4.serve.config import ServeConfig
from gshard_m4.stopping import asked_to_stop
from gshard_m4.text import PreparedText
from gshard_m4.translate import Translator, load

ENGLISH = ["save", "the", "file", "open", "a", "new", "window", "close", "now"]
FOREIGN = [word[::-1] for word in ENGLISH]


class Toy:
    """English spelt backwards, word by word; in place of `gshard_m4.text.PreparedText`."""

    fingerprint = "toy"
    digest = "toy"
    languages: ClassVar = {"aa": 900, "bb": 90, "pt_BR": 9}
    target_vocabulary = 3 + len(ENGLISH)
    source_vocabulary = target_vocabulary + len(languages)
    length = 8
    temperature = 5.0

    def rebatched(self, *, tokens, temperature):
        other = type(self)()
        other.temperature = temperature or self.temperature
        return other

    def tag(self, language):
        return self.target_vocabulary + list(self.languages).index(language)

    def batch(self, step):
        rng = np.random.default_rng(step)
        words = rng.integers(3, self.target_vocabulary, (16, self.length))
        ids = np.where(np.arange(self.length) < rng.integers(1, self.length, (16, 1)), words, 0)
        ids[np.arange(16), (ids != 0).sum(1)] = 1
        return {"source": ids.astype(np.int32), "target": ids.astype(np.int32)}

    def held_out(self, part="dev"):
        return [self.batch(10**6 if part == "dev" else 10**6 + 2)]

    def has(self, part):
        return True

    def near_twins(self, english):
        return [sentence.startswith("save") for sentence in english]

    def examples(self, count=None, part="test", each=None):
        ids = self.batch(10**6 + (1 if part == "test" else 3))["target"]
        rows = [[ENGLISH[i - 3] for i in row if i > 2] for row in ids]
        pairs = [(" ".join(w[::-1] for w in row), " ".join(row)) for row in rows]
        return [Pair(("aa", "bb")[i % 2], *pair) for i, pair in enumerate(pairs)][:count]

    def frequent_sentence(self):
        return "save the file"

    def source_ids(self, sentence):
        return [FOREIGN.index(word) + 3 if word in FOREIGN else 2 for word in sentence.split()]

    def english(self, ids):
        return " ".join(ENGLISH[i - 3] for i in ids)

    def spelt_in_bytes(self, ids):
        return 0.0


SMALL = ["--model-dim", "16", "--hidden-dim", "32", "--layers", "2", "--experts", "0"]


def read_toys(patch, toy):
    patch.setattr(PreparedText, "load", staticmethod(lambda folder: toy()))


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    read_toys(monkeypatch, Toy)
    monkeypatch.setattr(commands, "prepare", lambda options: "prepared")
    monkeypatch.setattr(demo_command, "prepare", lambda options: "prepared")
    monkeypatch.chdir(tmp_path)
    levels = {name: logging.getLogger(name).level for name in ("absl", "asyncio")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        read_toys(patch, Toy)
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        assert main(["train", "--run", str(folder), "--devices", "1", "--steps", "3", *SMALL]) == 0
    return folder


STORY = """no experts
on 1 device
compiling the training step for 1 device
measuring how long a step takes here
training 50 steps
cross entropy of sentences with new English:
== known English
translating 12 sentences
copy the source
are near copies, with half of their English words in the source
BLEU|nrefs:1
== new English
10 of 12 drawn at random (seed 0)
reference:
what it cannot do yet:
minutes in all
gshard-m4 translate --run runs/demo"""


def test_the_demo_tells_its_story(tmp_path, capsys):
    given = ["--steps", "51", "--minutes", "0.001", "--sentences", "12", "--max-length", "8", *SMALL, "--devices", "1"]
    given += ["--warmup-steps", "100", "--cooldown-steps", "0"]  # as the other tests: the same program for any --steps
    assert main(["demo", *given]) == 0
    told = capsys.readouterr().out
    assert [part for part in STORY.splitlines() if part not in told] == [], told
    assert told.count("model:     ") == 20
    assert (tmp_path / "runs" / "demo" / "checkpoints" / "00000050").is_dir()
    assert runs.corpus_of(Run(Path("runs/demo"))) == Path("data/demo"), "the run knows its corpus"


def test_lines_in_are_lines_out(trained, tmp_path, monkeypatch):
    given_lines = ["evas eht elif", "", "a a a a a a a a a a", "unknown words\t\u202e", "won\0\x07 won"] * 9
    (tmp_path / "in.txt").write_text("\n".join(given_lines) + "\n", "utf-8")
    given = ["translate", "in.txt", "--run", str(trained), "--output", "out.txt", "--max-length", "6"]
    assert main(given) == 0
    written = (tmp_path / "out.txt").read_text("utf-8").split("\n")
    assert (len(written), written[1]) == (len(given_lines) + 1, "")
    assert written[:5] * 9 == written[:-1], "what a line becomes does not depend on its neighbours"

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(given_lines).encode())))
    assert main([*given[:1], *given[2:]]) == 0
    assert (tmp_path / "out.txt").read_text("utf-8").split("\n") == written, "a pipe, without an end of its last line"


def test_what_is_not_utf8_is_told_with_its_line_and_nothing_before_is_lost(trained, tmp_path, capsys):
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfevas eht elif\n\nwon \xff\xfe\nwon\n")
    given = ["translate", "in.txt", "--run", str(trained), "--max-length", "6"]
    assert main(given) == 2
    told = capsys.readouterr()
    assert told.out.count("\n") == 2
    assert "line 3 is not UTF-8" in told.err
    assert "in.txt, line 3, byte 5" in told.err
    assert "Traceback" not in told.err
    assert main([*given, "--replace-invalid"]) == 0
    replaced = capsys.readouterr().out.split("\n")
    assert (len(replaced), replaced[:2]) == (5, told.out.split("\n")[:2])


def test_n_best_and_throughput(trained, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("evas eht elif\n\nwon\n")
    given = ["translate", "in.txt", "--run", str(trained), "--max-length", "6", "--from", "pt-br"]
    assert main([*given, "--n-best", "3", "--quiet"]) == 0
    told = capsys.readouterr()
    numbers, texts, scores = zip(*(line.split(" ||| ")[:3] for line in told.out.splitlines()), strict=True)
    assert (numbers, len(set(texts[:3]))) == (tuple("0001222"), 3)
    assert list(map(float, scores[:3])) == sorted(map(float, scores[:3]), reverse=True)
    assert told.err == ""
    assert main(given) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [texts[0], "", texts[4]]
    assert "3 lines, 8 source tokens" in told.err, "ends, and the name of the language, are tokens"
    assert "lines/s" in told.err


def test_a_slow_pipe_is_answered_line_by_line():
    def slowly():
        for n in range(3):
            yield str(n)
            assert answered.wait(10)
            answered.clear()

    answered = threading.Event()
    got = []
    for block in lines.blocks(slowly(), 100):
        got.append(block)
        answered.set()
    assert got == [["0"], ["1"], ["2"]]
    assert [len(b) for b in lines.blocks(iter(["x"] * 250), 100)] == [100, 100, 50]


def test_long_lines_are_cut_and_counted_and_empty_ones_kept(trained, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a " * 5_000_000 + "\nwon\n")  # ten megabytes
    given = ["translate", "in.txt", "--run", str(trained), "--max-length", "6"]
    assert main(given) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 2
    assert "1 line was longer than 7 tokens" in told.err
    for content in ("", "\n \n"):
        (tmp_path / "in.txt").write_text(content)
        assert main(given) == 0
        assert capsys.readouterr().out == content.replace(" ", "")


def test_ctrl_c(trained, monkeypatch, capsys):
    def interrupted(self, *_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Translator, "translate", interrupted)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"won\n")))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    try:
        assert main(["translate", "--run", str(trained)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == "gshard-m4: interrupted"


def test_other_vocabularies_are_refused(trained, monkeypatch, capsys):
    class Other(Toy):
        fingerprint = "another"

    read_toys(monkeypatch, Other)
    assert main(["translate", "--run", str(trained)]) == 2
    assert "toy of the model, another of the corpus" in capsys.readouterr().err
    assert main(["train", "--run", str(trained), "--devices", "1", *SMALL, "--steps", "4", "--resume"]) == 2
    told = capsys.readouterr().err
    assert "made with other vocabularies" in told
    assert "toy there, another here" in told


def test_a_language_is_told_to_the_model(trained):
    translator = load(Run(trained), Toy(), DecodeConfig(max_length=6))
    read = []

    class Reading(Toy):
        def tag(self, language):
            read.append([language])
            return super().tag(language)

    translator = dataclasses.replace(translator, text=Reading())
    lines = ["evas eht elif", "won", "", "evas " * 20]
    told = translator.translate(lines, "aa")
    assert read == [["aa"]] * 3, "there is nothing to tell of an empty line"
    assert [of.tokens for of in told] == [5, 3, 0, 8]
    assert [of.cut for of in told] == [False, False, False, True]
    assert [of.tokens for of in translator.translate(lines)] == [4, 2, 0, 8]
    assert translator.translate(lines[:1], "aa")[0] == told[0], "whatever the others are"


def test_help_into_a_pipe_that_closes():
    command = [sys.executable, "-m", "gshard_m4", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.communicate()[1] == b""
    assert process.returncode == 141


def test_evaluation_writes_scores_that_can_be_compared(trained, tmp_path, capsys):
    given = ["evaluate", "--run", str(trained), "--sentences", "10", "--max-length", "8", "--beam", "1"]
    assert main([*given, "--output", "first"]) == 0
    told = capsys.readouterr().out
    known, new = told.index("== known English"), told.index("== new English")
    assert known < told.index("held-out cross entropy") < new
    rows = [line.split()[:2] for line in told[known:new].splitlines() if line.strip()]
    assert ["2", "medium"] in rows, "a language of five sentences has no line of its own"
    assert "languages with fewer than 50 sentences are scored together, by class" in told
    assert "sentences are near copies" in told
    assert told.count("of 10 sentences are longer than the 7 tokens that the model reads") == 2
    assert "of 10 sentences have a near twin in training" not in told[known:new]
    assert "of 10 sentences have a near twin in training" in told[new:]
    assert "nw:2" in told
    files = {"results.json", "scores.csv", "classes.csv", "translations.tsv"}
    for folder in (Path("first"), Path("first/known-english")):
        assert {p.name for p in folder.iterdir()} >= files
        assert len((folder / "translations.tsv").read_text().splitlines()) == 10
    assert Path("first/results.json").read_text() != Path("first/known-english/results.json").read_text()

    assert main([*given, "--output", "second", "--baselines", "first"]) == 0
    again = list(csv.DictReader(Path("second/scores.csv").read_text().splitlines()))
    assert [row["language"] for row in again] == ["aa", "bb"]
    assert [row["pairs"] for row in again] == ["900", "90"]
    assert {row["delta_bleu"] for row in again} == {"0.0"}
    classes = list(csv.DictReader(Path("second/known-english/classes.csv").read_text().splitlines()))
    assert classes[-1]["resource"] == "all"
    assert (classes[-1]["sentences"], classes[-1]["compared"], classes[-1]["delta_chrf"]) == ("10", "2", "0.0")
    assert "better than first" in capsys.readouterr().out
    assert main([*given, "--output", "third", "--baselines", f"{trained}@3"]) == 0
    assert Path("third/scores.csv").read_text() == Path("second/scores.csv").read_text()

    shutil.rmtree("first/known-english")
    capsys.readouterr()
    assert main([*given, "--output", "fourth", "--baselines", "first"]) == 0
    assert "first was not scored on known English: no differences" in capsys.readouterr().out
    assert main([*given[:3], "--sentences", "11", "--max-length", "8", "--baselines", "first", "--test", "new"]) == 2
    assert "not of the same sentences" in capsys.readouterr().err


def test_a_corpus_without_known_english_says_so(trained, monkeypatch, capsys):
    class Former(Toy):
        def has(self, part):
            return not part.startswith("known")

    read_toys(monkeypatch, Former)
    given = ["evaluate", "--run", str(trained), "--sentences", "4", "--max-length", "8", "--beam", "1"]
    assert main([*given, "--output", "o"]) == 0
    told = capsys.readouterr().out
    assert "This corpus has no test of known English" in told
    assert "== new English" in told
    assert not Path("o/known-english").exists()
    assert main([*given, "--test", "known"]) == 2
    assert "there is nothing to score" in capsys.readouterr().err


def test_the_newest_run_is_meant(trained, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("won\n")
    given = ["translate", "in.txt", "--max-length", "6"]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert "there is no trained model" in told
    assert "gshard-m4 demo trains one" in told
    for number, name in enumerate(("runs/old", "runs/group/new", "runs/empty/checkpoints")):
        if "empty" in name:
            Path(name).mkdir(parents=True)
        else:
            shutil.copytree(trained, name)
            os.utime(Path(name) / "checkpoints" / "00000003", (10**9 + number, 10**9 + number))
    assert main(given) == 0
    told = capsys.readouterr().err
    assert "gshard-m4: using runs/group/new, the newest of 2 runs" in told
    assert main([*given, "--run", "runs/nwe"]) == 2
    assert "Name one of the runs there are: runs/group/new, runs/old." in capsys.readouterr().err


def test_the_step_of_the_newest_run_can_be_explained(trained, monkeypatch):
    shutil.copytree(trained, "runs/one")
    step, state, batch = planned.newest_step()
    assert batch["source"].shape == (16, Toy.length)
    after, metrics = jax.eval_shape(step, state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert metrics["loss"].shape == ()


def test_another_temperature_is_told_with_what_goes_on_as_before(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "r")
    again = ["train", "--run", "r", "--devices", "1", *SMALL, "--resume"]
    assert main([*again, "--steps", "4", "--temperature", "2"]) == 0
    assert checkpoint.described(Run(tmp_path / "r").checkpoints, 4)["temperature"] == 2.0
    told = "languages were drawn with a temperature of 5 up to step 3, and are drawn with 2 from here on; --temperature"
    assert told in capsys.readouterr().out


def test_steps_that_are_not_finite_end_a_run_with_a_code_of_their_own(tmp_path, capsys):
    given = ["train", "--run", "r", "--devices", "1", *SMALL, "--learning-rate", "1e38", "--skip-limit", "1"]
    assert main([*given, "--steps", "9"]) == 4
    told = capsys.readouterr()
    assert re.search(r"is (nan|inf) at step \d+\. That makes 2 steps that were not finite\.", told.err)
    assert "learning_rate" in told.err
    skipped = sorted(Run(tmp_path / "r").skipped.iterdir())
    with np.load(skipped[1], allow_pickle=False) as kept:
        assert np.array_equal(kept["target"], Toy().batch(int(skipped[1].stem))["target"]), "their batches are kept"
    records = [json.loads(line) for line in Run(tmp_path / "r").metrics.read_text().splitlines()]
    assert ([record["skipped"] for record in records[-2:]], records[-1]["loss"]) == ([0, 1], None)


SIGNALLED = """
import os, signal
from gshard_m4.stopping import asked_to_stop

signal.signal(signal.SIGINT, signal.default_int_handler)
with asked_to_stop() as asked:
    for number in (signal.SIGINT, signal.SIGTERM, signal.{}):
        os.kill(os.getpid(), number)
        assert asked()
        print(asked.exit_code, flush=True)
"""


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_of_a_kind_ends_training_at_once(last):
    """Without waiting for the step to end, which the first one of a kind does."""
    program = SIGNALLED.format(last.name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-last, "130\n130\n")
    assert done.stderr.count("ends the process at once") == 2


def test_what_a_shell_script_starts_in_the_background_ignores_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with asked_to_stop() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_compiled_programs_are_kept_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    named = compilation_cache.ENVIRONMENT
    for environment, parent in (
        ({named: ""}, tmp_path / ".cache" / "m4" / "xla"),
        ({named: str(tmp_path / "other")}, tmp_path / "other"),
        ({named: "off"}, None),
        ({named: str(tmp_path / "file")}, None),  # a command works without it
        ({named: "", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}, None),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        found = compilation_cache.keep_compiled()
        assert (found and found.parent) == parent
        assert compilation_cache.keep_compiled(off=True) is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_request_to_stop_saves_and_prints_the_line_that_goes_on(number, code, tmp_path, monkeypatch, capsys):
    class Interrupting(Toy):
        def batch(self, step):
            if step == 2:
                os.kill(os.getpid(), number)
            return super().batch(step)

    read_toys(monkeypatch, Interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    try:
        assert main(["train", "--run", "r", "--devices", "1", "--steps", "50", *SMALL]) == code
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert [p.name for p in Run(tmp_path / "r").checkpoints.iterdir()] == ["00000003"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "stopped as asked after step 3; go on with: gshard-m4 " in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "told"), [
    (["train", "--devices", "99"], "cannot use 99 devices"),
    (["train", "--steps", "0"], "steps must be at least 1, got 0"),
    (["train", "--processes", "2"], "several processes need a coordinator"),
    (["translate", "--beam", "0"], "beam must be at least 1, got 0"),
    (["serve", "--port", "70000"], "port must be from 0 to 65535"),
    (["train", "--temperature", "0.5"], "cannot be drawn with a temperature of 0.5"),
    (["train", "--temperature", "nan"], "cannot be drawn with a temperature of nan"),
    (["train", "--temperature", "inf"], "cannot be drawn with a temperature of inf"),
    (["train", "--experts", "1"], "at least two experts"), (["train", "--layers", "3"], "must be a multiple of 2"),
    (["train", "--run", "file"], "cannot be written"), (["translate", "--run", "nowhere"], "there is no checkpoint"),
    (["translate", "--run", "{trained}", "missing.txt"], "the input cannot be read"),
    (["translate", "--run", "{trained}", "--step", "9"], "there is no step 9"),
    (["translate", "--run", "{trained}", "--from", "b"], "knows no language 'b'"),
    (["translate", "--run", "{trained}", "--batch", "0"], "cannot translate 0 sentences"),
    (["translate", "file", "--output", "file"], "would overwrite the input"),
    (["evaluate", "--run", "{trained}", "--sentences", "0"], "cannot score 0 sentences"),
    (["evaluate", "--run", "{trained}", "--baselines", "{trained}@x"], "'x' is no step"),
    (["evaluate", "--run", "{trained}", "--baselines", "nowhere"], "there is no checkpoint"),
    (["evaluate", "--run", "{trained}", "--baselines", "file"], "these are no translations"),
])  # fmt: skip
def test_what_is_wrong_is_told_in_a_few_lines(arguments, told, trained, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = [word.replace("{trained}", str(trained)) for word in arguments]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("gshard-m4: ")
    assert "Traceback" not in error
    assert len(error.splitlines()) <= 6
    with pytest.raises(Exception, match=told):
        main([*arguments, "--debug"])


def test_the_version(capsys):
    assert main(["--version"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"gshard-m4 {version('gshard-m4')} (gshard {version('gshard')}, jax {jax.__version__}, ")


@pytest.mark.parametrize(("arguments", "told"), [
    ([], "demo"), (["trian"], "train"), (["train", "--step", "3"], "--steps"),
    (["train", "--preset", "huge"], "moe-8e-4l"),
])  # fmt: skip
def test_usage(arguments, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert told in "".join(capsys.readouterr())


def test_help(capsys):
    for command in ([], ["prepare"], ["train"], ["translate"], ["evaluate"], ["serve"], ["demo"]):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--help"])
        assert stopped.value.code == 0
        assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize(("options", "wrong"), [
    *((TrainConfig, of) for of in ({"learning_rate": 0.0}, {"label_smoothing": 1.0}, {"save_every": -1},
                                   {"save_minutes": 0.0})),
    *((DecodeConfig, of) for of in ({"max_length": 0}, {"alpha": -0.1}, {"alpha": float("nan")}, {"n_best": 0},
                                    {"n_best": 5})),
    *((ServeConfig, of) for of in ({"queue": 0}, {"rate": -1}, {"timeout": 0}, {"rate": float("nan")},
                                   {"connections": 0}, {"proxies": "10.0.0.1, example.org"})),
])  # fmt: skip
def test_impossible_options_are_refused(options, wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        options(**wrong)
