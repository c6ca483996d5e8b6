"""A run that goes on with fewer devices, or with replicas, computes the same numbers: groups follow the batch."""

import dataclasses
import io
import itertools
import json

import jax
import numpy as np
import pytest

from gshard import moe
from gshard_m4 import checkpoint, train
from gshard_m4.config import ModelChoice, Run, TrainConfig, mesh_of, on_devices
from gshard_m4.groups import groups_of, uneven
from gshard_m4.processes import Alone
from gshard_m4.progress import Progress
from m4.test_together import end, losses, start

B, L, V = 16, 8, 19
MODEL = moe.TransformerConfig(
    source_vocabulary=V, target_vocabulary=V, model_dim=8, hidden_dim=16, heads=2, head_dim=4, encoder_layers=2,
    decoder_layers=2, experts=8, group_size=None, groups=8, capacity_factor=1.5, dropout=0.1,
)  # fmt: skip


def batch(step, *_):
    """Sentences of several lengths, ended and padded."""
    rng = np.random.default_rng(step)
    ids = np.where(np.arange(L) < rng.integers(1, L, (B, 1)), rng.integers(3, V, (B, L)), 0).astype(np.int32)
    ids[np.arange(B), (ids != 0).sum(1)] = 1
    return {"source": ids, "target": ids[:, ::-1].copy()}


def records(folder, stages, model=MODEL):
    """What each step says of a run in stages: so many devices, up to so many steps, in so many replicas."""
    for devices, steps, *replicas in stages:
        options = TrainConfig(steps=steps, warmup_steps=2)
        on = on_devices(model, devices, *replicas)
        shown = Progress(steps, 1, io.StringIO())
        train.train(on, options, Run(folder), batch, resume=True, show=shown)
    return [json.loads(line) for line in Run(folder).metrics.read_text().splitlines()]


@pytest.mark.slow
def test_eight_then_four_then_one_device(tmp_path):
    want = records(tmp_path / "one", [(1, 9)])
    got = records(tmp_path / "elastic", [(8, 3), (8, 5, 2), (4, 6), (4, 7, 4), (1, 9)])
    assert [of["step"] for of in got] == list(range(9))
    for name in ("loss", "cross_entropy", "aux_loss", "gradient_norm"):
        np.testing.assert_allclose([of[name] for of in got], [of[name] for of in want], rtol=2e-4, err_msg=name)
    assert [of["dropped_share"] for of in got] == [of["dropped_share"] for of in want], "a token took another way"
    assert all(of["dropped_share"] > 0 for of in want), "experts that are never full prove little"

    # What would have happened with one group for each device.
    loose = dataclasses.replace(MODEL, groups=None)
    of_one, of_eight = (records(tmp_path / name, [(n, 1)], loose)[0] for name, n in (("l1", 1), ("l8", 8)))
    assert of_one["dropped_share"] != of_eight["dropped_share"]


@pytest.mark.parametrize(("devices", "replicas"), [(3, 1), (8, 2)])
@pytest.mark.slow
def test_a_new_state_is_made_where_it_stays(devices, replicas, tmp_path):
    """So that the second step is the program of the first one, also where 8 experts are dealt out to 3 devices."""
    model = on_devices(MODEL, devices, replicas)
    loop = train._Loop(model, TrainConfig(steps=1), Run(tmp_path), batch, [], {}, Alone(), None)
    state = loop._start(resume=False)
    lowered = loop.compiled.lower(state, batch(0))
    given = [leaf.sharding for leaf in jax.tree.leaves(state)]
    assert given == list(lowered.argument_shardings)[: len(given)]
    assert devices == 3 or any(not sharding.is_fully_replicated for sharding in given)
    back = jax.tree.leaves(lowered.out_info[0])
    assert all(to.sharding.is_equivalent_to(of, len(to.shape)) for of, to in zip(given, back, strict=True))
    alone = jax.tree.leaves(train.initial_state(MODEL, 0))
    assert all(map(np.array_equal, jax.tree.leaves(state), alone)), "the parameters of any number of devices"


def test_replicas_divide_the_devices():
    assert mesh_of(on_devices(MODEL, 8, 8)) == {"data": 8}
    assert on_devices(on_devices(MODEL, 8, 2), 1) == MODEL, "a model of replicas is used on one device"
    with pytest.raises(moe.ModelError, match=r"8 devices, 3 replicas(.|\n)*divisor"):
        on_devices(MODEL, 8, 3)
    with pytest.raises(moe.ModelError, match="has no experts to replicate"):
        on_devices(dataclasses.replace(MODEL, experts=0, groups=None), 8, 2)


@pytest.mark.slow
def test_each_process_may_be_a_replica(tmp_path):
    (one,) = start(tmp_path / "one", 4, 1)
    pair = start(tmp_path / "two", 4, 2, {rank: ["replicas=2"] for rank in range(2)})
    assert [end(process)[0] for process in (one, *pair)] == [0, 0, 0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-4)


def saved(folder, model):
    """A run that ended after one step, of a model that its checkpoint describes so."""
    shapes = jax.eval_shape(lambda: train.initial_state(MODEL, 0))
    state = jax.tree.map(lambda of: np.zeros(of.shape, of.dtype), shapes) | {"step": np.int32(1)}
    meta = {"model": model, "train": dataclasses.asdict(TrainConfig(steps=1))}
    checkpoint.save(Run(folder).checkpoints, 1, state, meta)


def test_another_number_of_groups_is_refused_and_the_right_one_named(tmp_path):
    """Also where nobody chose a number: then it was that of the devices."""
    of_one = dataclasses.replace(MODEL, groups=None)
    saved(tmp_path, dataclasses.asdict(of_one))
    with pytest.raises(train.TrainError, match=r"in 1 groups, and here there would be 8(.|\n)*Add --groups 1"):
        records(tmp_path, [(1, 1)])
    records(tmp_path, [(1, 1)], dataclasses.replace(MODEL, groups=1))


def test_a_run_goes_on_whose_checkpoint_names_fewer_choices_than_there_are_now(tmp_path):
    then = dataclasses.asdict(MODEL)
    for name in ("groups", "top_k", "positions", "kv_heads"):
        del then[name]
    saved(tmp_path, then | {"partitions": 8})
    records(tmp_path, [(1, 1)])
    with pytest.raises(train.TrainError, match="kv_heads is None there and 1 here"):
        records(tmp_path, [(1, 1)], dataclasses.replace(MODEL, kv_heads=1))


def test_groups_divide_both_sides_of_a_batch_or_it_is_told():
    sides = ((24, 32), (192, 128), (128, 128))
    for rows, accumulate, (source, target) in itertools.product((8, 48, 104, 1024, 40_000), (1, 2, 8), sides):
        groups = groups_of((rows, source, target), accumulate)
        part = rows // accumulate
        assert part * source % groups == part * target % groups == 0
        assert groups == 8 or 512 <= part * min(source, target) // groups < 2048 or groups < 8

    for partitions in (4, 8):
        assert uneven(dataclasses.replace(MODEL, partitions=partitions)) == []
    (experts, groups) = uneven(dataclasses.replace(MODEL, partitions=3))
    assert experts.startswith("8 experts do not divide among 3 devices: a device has up to 3, and a step takes as long")
    assert groups.startswith("8 groups of tokens do not divide among 3 devices")
    dense = ModelChoice("dense-4l").transformer(100, 100, 3, groups=8)
    assert dense.groups is None
    assert uneven(dense) == []
    assert ModelChoice("moe-8e-4l", groups=4).transformer(100, 100, 2, groups=8).groups == 4
