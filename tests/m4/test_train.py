"""Training: it learns, on eight devices as on one; it resumes bit for bit; it stops at the step that goes wrong."""

import dataclasses
import io
import json
import os
import re

import jax
import numpy as np
import pytest

from gshard import moe
from gshard_m4 import checkpoint, train
from gshard_m4.config import ModelChoice, Run, TrainConfig
from gshard_m4.lock import locked
from gshard_m4.progress import Progress
from gshard_m4.train import TrainError

B, L, V = 16, 8, 12
MODEL = moe.TransformerConfig(
    0, V, model_dim=16, hidden_dim=32, heads=2, head_dim=8, encoder_layers=0, decoder_layers=2, experts=4,
    group_size=None, dropout=0.1,
)  # fmt: skip
OPTIONS = TrainConfig(steps=6, peak_step=20, warmup_steps=2)


def batch(step):
    """A translation that can be learnt: every word has one counterpart. Lengths vary."""
    rng = np.random.default_rng(step)
    source = rng.integers(3, V, (B, L)).astype(np.int32)
    real = np.arange(L) < rng.integers(2, L + 1, (B, 1))
    target = np.where(real, (source * 7 - 3) % (V - 3) + 3, 0)
    ends = real.sum(1) - 1
    target[np.arange(B), ends] = 1
    return {"source": np.where(real, source, 0).astype(np.int32), "target": target.astype(np.int32)}


def quiet(steps):
    return Progress(steps, 10**9, io.StringIO())


def run_of(path, options, model=MODEL, **given):
    return train.train(model, options, Run(path), batch, show=quiet(options.steps), **given)


def losses(path):
    return [float(json.loads(line)["loss"]).hex() for line in Run(path).metrics.read_text().splitlines()]


def bytes_of(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_it_learns(tmp_path):
    options = TrainConfig(steps=200, peak_step=400, warmup_steps=10)
    model = dataclasses.replace(MODEL, source_vocabulary=V, encoder_layers=2)
    result = run_of(tmp_path, options, model, held_out=[batch(1000), batch(1001)])
    assert list(result.held_out) == [0, 200]
    assert result.held_out[200] < 0.5 * result.held_out[0]
    records = [json.loads(line) for line in Run(tmp_path).metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(200))
    assert {"loss", "cross_entropy", "aux_loss", "dropped_share", "load_entropy", "seconds"} <= records[0].keys()
    assert records[-1]["held_out"] == result.held_out[200]


def test_a_resumed_run_computes_the_same_numbers(tmp_path, capsys):
    """Although the newest checkpoint cannot be used. Minutes decide when to save, or a number of steps."""
    whole = run_of(tmp_path / "whole", dataclasses.replace(OPTIONS, save_minutes=1e-9, keep=5))
    assert checkpoint.steps(Run(tmp_path / "whole").checkpoints) == [2, 3, 4, 5, 6]
    asked = iter([False, False, False, True])
    first = run_of(tmp_path, dataclasses.replace(OPTIONS, save_every=3), stop=lambda: next(asked))
    assert first.stopped
    assert checkpoint.steps(Run(tmp_path).checkpoints) == [3, 4]
    (Run(tmp_path).checkpoints / "00000004" / checkpoint.META).write_text("{}")
    second = run_of(tmp_path, dataclasses.replace(OPTIONS, save_every=0, save_minutes=1e-9, keep=5), resume=True)
    assert "passed over" in capsys.readouterr().out
    assert checkpoint.steps(Run(tmp_path).checkpoints) == [3, 4, 6]
    assert losses(tmp_path) == losses(tmp_path / "whole")
    assert bytes_of(second.state) == bytes_of(whole.state)


def test_what_is_refused_before_the_first_step(tmp_path):
    meta = {"model": dataclasses.asdict(MODEL)}
    checkpoint.save(Run(tmp_path).checkpoints, 1, train.initial_state(MODEL, 0), meta)
    with pytest.raises(TrainError, match="has a checkpoint of step 1 already"):
        run_of(tmp_path, OPTIONS)
    with pytest.raises(TrainError, match="experts is 4 there and 8 here"):
        run_of(tmp_path, OPTIONS, dataclasses.replace(MODEL, experts=8), resume=True)
    with (
        locked(Run(tmp_path).lock),
        pytest.raises(TrainError, match=rf"another process(.|\n)*process {os.getpid()} on"),
    ):
        run_of(tmp_path, OPTIONS, resume=True)


def test_lines_where_there_is_no_terminal():
    out = io.StringIO()
    values = {"tokens": 100.0, "loss": 5.0, "cross_entropy": 4.5, "aux_loss": 1.02, "dropped_share": 0.03}
    values |= {"load_entropy": 0.97}
    with Progress(5, 2, out) as bar:
        bar.note("before")
        for done in range(1, 6):
            bar.update(done, values)
    before, *lines = out.getvalue().splitlines()
    assert (before, [line.split()[1] for line in lines]) == ("before", ["2/5", "4/5", "5/5"])
    assert re.search(r"loss 5\.000 .*cross entropy 4\.500  aux 1\.02  dropped 3\.0%  load entropy 0\.97", lines[0])


def test_presets_and_what_differs_from_them():
    model = ModelChoice("moe-8e-4l").transformer(100, 90, partitions=8)
    assert (model.experts, model.encoder_layers, model.decoder_layers) == (8, 2, 2)
    assert (model.model_dim, model.hidden_dim, model.partitions) == (256, 1024, 8)
    assert ModelChoice("moe-8e-4l", experts=0, layers=8).transformer(9, 9).encoder_layers == 4
    with pytest.raises(moe.ModelError, match="two experts"):
        ModelChoice("demo", experts=1).transformer(9, 9)
