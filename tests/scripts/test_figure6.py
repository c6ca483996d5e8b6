"""What scripts/figure6.py compares: models of equal FLOPs, whose steps are equal wherever it is cut short."""

import dataclasses
import json
import math
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro

from gshard import moe
from gshard_m4 import evaluate, evaluation_files
from gshard_m4.by_class import by_class, by_language
from gshard_m4.config import ModelChoice
from gshard_m4.corpus.pair import Pair
from gshard_m4.held_out import BOTH

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import figure6
import figure6_page
from figure6_job import DENSE, DONE, SIZES, Job, Size
from figure6_shown import FOUND, SURE, Loss, chance, needed, shown, strength


def model(options: str) -> moe.TransformerConfig:
    return tyro.cli(ModelChoice, args=shlex.split(options)).transformer(100, 100)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_models_differ_in_experts_and_in_nothing_else_that_takes_flops(size: Size) -> None:
    dense = model(size.models[DENSE])
    for name, options in size.models.items():
        found = model(options)
        assert found.experts == (0 if name == DENSE else int(name.removeprefix("moe-")))
        if name != DENSE:  # two experts for a token in every other layer
            assert 2 * dense.hidden_dim == 3 * found.hidden_dim
            routed = {"experts": 0, "hidden_dim": dense.hidden_dim, "groups": dense.groups}
            assert dataclasses.replace(found, **routed) == dense


def test_turns_end_before_the_learning_rate_falls() -> None:
    assert figure6.stops(3000, 1000, 2) == [2000, 3000]
    assert figure6.stops(3000, 1000, 3) == [1000, 2000, 3000]
    assert figure6.stops(20_000, 0, 1) == [20_000]


def test_choices_are_tried_with_models_that_there_are() -> None:
    for size in SIZES.values():
        assert set(size.piloted) <= set(size.models)
        assert bool(size.choices) == bool(size.piloted) == bool(size.pilot_steps)
        assert size.pilot_steps <= figure6.stops(size.steps, size.cooldown, size.rounds)[0]


def test_a_learning_rate_falls_in_a_copy_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = dataclasses.replace(SIZES["smallest"], choices=(), piloted=(), pilot_steps=0)
    job = Job(Path(), tmp_path, size, 20, 8, (), (), "", Path(), math.inf, "")
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(figure6, "train", lambda job, name, options, steps, extra=(): asked.append((name, steps)))
    (tmp_path / DENSE / "checkpoints" / "15").mkdir(parents=True)
    figure6.end(job, DENSE)
    assert asked == [("dense-20", 20)]
    assert (tmp_path / "dense-20" / "checkpoints" / "15").is_dir()
    with pytest.raises(SystemExit, match="give --steps of 20 or more"):
        figure6.end(dataclasses.replace(job, steps=12), DENSE)


def tables_of(page: str) -> dict[str, dict[str, list[dict]]]:
    """The tables of classes on a page: test -> model -> rows."""
    found: dict[str, dict[str, list[dict]]] = {}
    for test in ("known English", "new English"):
        section = page.split(f"\n## {test[0].upper()}{test[1:]}\n")[1].split("\n## ")[0]
        row = re.compile(
            r"\| (\S+) \| (\d+) (high|medium|low|all) \| ([\d,]+) to ([\d,]+) \| ([\d,]+) \| [^|]+ \| [^|]+ "
            r"\| (?:(\S+) \((\S+)\))? \| (?:(\S+) \((\S+)\))? \|"
        )
        for name, _, resource, _, _, sentences, bleu, p_bleu, chrf, p_chrf in row.findall(section):
            numbers = {"delta_bleu": bleu, "p_bleu": p_bleu, "delta_chrf": chrf, "p_chrf": p_chrf}
            found.setdefault(test, {}).setdefault(name, []).append(
                {"resource": resource, "sentences": float(sentences.replace(",", ""))}
                | {key: float(value) if value and value != "–" else None for key, value in numbers.items()}
            )
    return found


def section_of(page: str) -> str:
    """What a page should say is shown, from its own tables."""
    models = re.findall(r"\| (\S+) \| `--.*?\| ([\d.]+) M \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|\n", page)
    losses = {name: Loss(*map(float, of)) for name, _, *of in models}
    languages = re.findall(r"\n\| \w+ \| ([\d,]+) \| \d+ \| ", page.split("\n## New English\n")[1].split("\n## ")[0])
    pairs = sorted((int(n.replace(",", "")) for n in languages), reverse=True)
    quarter = len(pairs) // 4
    by_class = {"high": pairs[:quarter], "medium": pairs[quarter:-quarter], "low": pairs[-quarter:]}
    temperature = re.search(r"a temperature of (\d+)", page)
    return shown(tables_of(page), losses, float(models[0][1]) * 1e6, by_class, float(temperature[1]))


def test_the_page_says_what_its_tables_show() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text("utf-8")
    assert section_of(page) in page


def test_a_page_is_written_from_what_was_measured(tmp_path: Path, rng: np.random.Generator) -> None:
    """With the section that its tables lead to, whatever they are."""
    data, size = tmp_path / "data", SIZES["narrow"]
    pairs = {f"l{number}": 90_000 // (number + 1) for number in range(8)}
    data.mkdir()
    settings = {"tier": "base", "sources": None, "temperature": 5.0, "length": 32}
    manifest = {"languages": pairs, "pairs": {"train": sum(pairs.values())}, "settings": settings}
    (data / "manifest.json").write_text(json.dumps(manifest | {"source_vocabulary": 80, "target_vocabulary": 40}))
    words = "open the file save a new window and close all of them now".split()
    english = [" ".join(rng.choice(words, 7)) for _ in range(160)]
    examples = [Pair(f"l{number % 8}", line[::-1], line) for number, line in enumerate(english)]
    job = Job(data, tmp_path, size, 1500, 160, (), (), "a try", tmp_path / "docs" / "page.md", math.inf, "again")
    by_dense: dict[str, list[str]] = {}
    for name, wrong in ((DENSE, 0.4), ("moe-8", 0.33)):
        written = [" ".join(w if rng.random() > wrong else "x" for w in line.split()) for line in english]
        for held in BOTH:
            found = evaluate.measure(name, examples, written, pairs)
            found = dataclasses.replace(found, cross_entropy=2.0 + wrong, beside={"copy": (1.0, 2.0)})
            dense = [] if name == DENSE else [evaluate.Results.load(job.evaluation(DENSE, held))]
            classes = by_class(found, examples, written, by_dense)
            languages = by_language(found, examples, written, by_dense, evaluate.differences(found, dense))
            evaluation_files.save(job.evaluation(name, held), found, examples, written, languages, classes)
        (job.evaluation(name) / DONE).write_text("1500")
        steps = [{"cross_entropy": 2.5 - wrong + 0.1 * x, "tokens": 700.3, "seconds": 0.2} for x in rng.random(1500)]
        (job.run(name) / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
        if name == DENSE:
            for example, line in zip(examples, written, strict=True):
                by_dense.setdefault(example.language, []).append(line)
    figure6_page.write(job, [["train"]])
    page = job.page.read_text("utf-8")
    assert "by more than chance in" in page
    assert section_of(page) in page
    assert "1.05 M target tokens are at most 0.35 M sentences" in page


def test_a_p_says_how_many_deviations_a_difference_has(rng: np.random.Generator) -> None:
    """As gshard-m4 evaluate counts: samples whose difference is further from the mean than the measured one from 0."""
    for has in (0.5, 1.2, 1.645, 2.5):
        samples = rng.normal(has, 1.0, 400_000)
        p = float(np.mean(np.abs(samples - samples.mean()) >= has))
        assert abs(chance(has) - p) < 0.003
        assert abs(strength(p) - has) < 0.03


def test_so_many_sentences_find_a_difference_that_often(rng: np.random.Generator) -> None:
    has = 0.8  # deviations, with 100 sentences
    count = float(needed(100, has, strength(SURE)).replace(",", ""))
    measured = rng.normal(has * math.sqrt(count / 100), 1.0, 4000)
    found = np.mean([chance(one) < SURE for one in measured if one > 0] + [0.0] * int(np.sum(measured <= 0)))
    assert abs(found - FOUND) < 0.03
    assert needed(100, -has, strength(SURE)) == "–"
