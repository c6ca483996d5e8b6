"""What scripts/figure6.py compares: models of equal FLOPs, whose steps are equal wherever it is cut short."""

import dataclasses
import math
import shlex
import sys
from pathlib import Path

import pytest
import tyro

from gshard import moe
from m4.config import ModelChoice

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import figure6
from figure6_job import DENSE, SIZES, Job, Size


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
