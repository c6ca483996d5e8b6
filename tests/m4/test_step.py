"""The step: its optimizer against a transcription, micro-batches, half precision, and eight devices as one."""

import dataclasses
import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import gshard
from checked_calls import near
from gshard import moe
from gshard.moe import Param
from gshard_m4 import optimizer
from gshard_m4.config import PRESETS, ModelChoice, TrainConfig
from gshard_m4.errors import TrainError
from gshard_m4.metrics import MetricsLog
from gshard_m4.optimizer import Adafactor
from gshard_m4.planned import describe_model, plan_summary
from gshard_m4.step import initial_state, make_evaluation, make_step
from moe import naive

V = 14
DENSE = moe.TransformerConfig(
    V, V, model_dim=16, hidden_dim=32, heads=2, head_dim=8, encoder_layers=2, decoder_layers=2, dropout=0.0
)
ALONE = dataclasses.replace(DENSE, source_vocabulary=0, encoder_layers=0)  # a decoder: half of the program
SPARSE = dataclasses.replace(DENSE, experts=8, group_size=None, dropout=0.1)


def batch(rng, rows=16, length=8):
    ids = np.where(np.arange(length) < rng.integers(1, length, (rows, 1)), rng.integers(3, V, (rows, length)), 0)
    ids[np.arange(rows), (ids != 0).sum(1)] = 1
    return {"source": ids.astype(np.int32), "target": ids[:, ::-1].astype(np.int32)}


@functools.cache
def step_and_state(model):
    """Compiled once; the first state is not, as its parameters come from numpy."""
    like = jax.eval_shape(lambda: initial_state(model, 0))
    state = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), like)
    params = jax.tree.map(jnp.asarray, naive.values(moe.param_specs(model)))
    return jax.jit(make_step(model, TrainConfig())), state | {"params": params}


def test_micro_batches_add_up_to_the_batch(rng):
    """Sentences are of all lengths, so the mean of the micro-batches' means would be another number."""
    given, (step, state) = batch(rng), step_and_state(ALONE)
    whole, want = step(state, given)
    parts, got = jax.jit(make_step(ALONE, TrainConfig(accumulate=4)))(state, given)
    for name in ("loss", "cross_entropy", "gradient_norm", "tokens"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)
    near(parts, whole, 2e-3, 2e-5)


def test_devices_combine_what_micro_batches_add_to_once(rng):
    model = dataclasses.replace(SPARSE, partitions=4)
    state = jax.eval_shape(lambda: initial_state(model, 0))
    mesh = gshard.Mesh.abstract(devices=4)
    found = gshard.explain(make_step(model, TrainConfig(accumulate=4)), state, batch(rng, 32), mesh=mesh)
    sums = [c for c in found.spmd.collectives if c.kind == "all_reduce"]
    # All but the gates': their weights are marked replicated, and so are the gradients.
    gradients = [c for c in sums if "," in c.shape and c.shape not in ("f32[16,8]", "s32[8]")]
    assert len(gradients) > 30
    assert {c.times for c in gradients} == {1}, "those of stacked layers too"
    others = sum(row.bytes for row in found.collectives if row.kind not in ("all_reduce", "all_to_all"))
    assert others < 0.05 * found.total_bytes, "the sentences themselves, where micro-batches are dealt, and masks"


def test_a_step_that_is_not_finite_changes_nothing_but_counts(rng):
    step, state = step_and_state(ALONE)
    state, given = jax.tree.map(lambda x: x, state), batch(rng)  # dictionaries of its own
    state["params"]["decoder"]["norm"] = state["params"]["decoder"]["norm"].at[3].set(jnp.inf)
    after, metrics = step(state, given)
    assert not np.isfinite(metrics["loss"])
    assert (int(after["step"]), int(after["skipped"]), float(metrics["skipped"])) == (1, 1, 1.0)
    for name in ("params", "moments"):
        same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), after[name], state[name])
        assert all(jax.tree.leaves(same))


def test_activations_may_be_bfloat16_and_the_router_is_not(rng):
    model = dataclasses.replace(SPARSE, dtype="bfloat16", dropout=0.0)
    state, given = jax.eval_shape(lambda: initial_state(model, 0)), batch(rng)
    assert {str(x.dtype) for x in jax.tree.leaves((state["params"], state["moments"]))} == {"float32"}
    program = jax.make_jaxpr(make_step(model, TrainConfig()))(state, given)
    products = [line.split("=")[0] for line in str(program).splitlines() if "dot_general" in line]
    gates = [line for line in products if ",128,8]" in line]  # logits_GSE: 128 tokens, 8 experts
    assert gates
    assert all(":f32[" in line for line in gates)
    assert any(":bf16[" in line for line in products), "the rest is bfloat16"
    params = naive.values(moe.param_specs(model))
    half, _ = jax.jit(make_evaluation(model))(params, given)
    full, _ = jax.jit(make_evaluation(dataclasses.replace(model, dtype="float32")))(params, given)
    np.testing.assert_allclose(half, full, rtol=0.02)


def test_every_preset_makes_a_model():
    for preset in PRESETS:
        model = ModelChoice(preset).transformer(64_000, 32_000, partitions=8)
        weights = moe.parameter_count(moe.param_specs(model))
        assert f"{weights / 1e6:.1f} million weights" in describe_model(model)
    paper = ModelChoice("paper-moe-2048e-36l").transformer(64_000, 32_000, partitions=8)
    assert moe.param_specs(paper) == moe.param_specs(moe.TABLE_1["MoE(2048E, 36L)"])


def test_a_plan_needs_no_devices(rng):
    model = ModelChoice("paper-moe-512e-12l").transformer(900, 800, partitions=512)
    model = dataclasses.replace(model, source_vocabulary=0, encoder_layers=0, decoder_layers=2)  # planned in less time
    told = plan_summary(model, TrainConfig(), {"target": batch(rng, 512, 256)["target"]})
    for part in ("on 512 devices", "['experts']['wi']", "512@devices"):
        assert part in told


def test_metrics_go_to_tensorboard_and_begin_where_the_run_does(tmp_path):
    for first in (0, 2):
        with MetricsLog(tmp_path / "metrics.jsonl", first, tmp_path / "events") as log:
            for step in range(first, first + 3):
                log.write(step, {"loss": 5.0 - step, "nothing": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5
    assert '{"step": 4, "loss": 1.0, "nothing": null}' in (tmp_path / "metrics.jsonl").read_text()
    found = {}
    for path in (tmp_path / "events").iterdir():
        content = path.read_bytes()
        while content:  # length, its checksum, an event, its checksum
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            found.update((event.step, value.simple_value) for value in event.summary.value if value.tag == "loss")
            content = content[16 + size :]
    assert found == {step: 5.0 - step for step in range(5)}
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot be written"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl", 0)


SPECS = {
    "experts": {
        "wi": Param((3, 8, 4, 5), ("layers", "experts", "model", "hidden")),
        "bias": Param((3, 8, 5), ("layers", "experts", "hidden")),
    },
    "router": Param((3, 4, 8), ("layers", "model", "experts")),
    "scale": Param((3, 4), ("layers", "model")),
    "wq": Param((3, 4, 2, 6), ("layers", "model", "heads", "head")),
    "embedding": Param((11, 4), ("vocabulary", "model")),
    "final": Param((4,), ("model",)),
}


def leaves(tree, prefix=""):
    """Flat view of a nested dictionary, down to what is no dictionary."""
    flat = {}
    for name, node in tree.items():
        if isinstance(node, dict) and not {"row", "full"} & node.keys():
            flat |= leaves(node, f"{prefix}{name}/")
        else:
            flat[prefix + name] = node
    return flat


def random_tree(rng, scale=1.0):
    return jax.tree.map(lambda spec: scale * rng.standard_normal(spec.shape).astype(np.float32), SPECS)


def reference(spec, grads, param, config):
    """The whole history of one parameter in float64: one variable per layer, one matrix at a time."""
    if spec.dims[0] == "layers":
        inner = Param(spec.shape[1:], spec.dims[1:])
        return np.stack([reference(inner, [g[i] for g in grads], param[i], config) for i in range(spec.shape[0])])
    param = param.astype(np.float64)
    moments = {}
    # Split the variable into the units that share second moments: matrices, or single vectors.
    plain = [i for i, d in enumerate(spec.dims) if d != "experts"]
    kept = sorted(sorted(plain, key=lambda i: spec.shape[i])[-2:])
    outer = [i for i in range(len(spec.shape)) if i not in kept]
    for t, g in enumerate(grads):
        g = g.astype(np.float64)
        decay = 1 - (t + 1) ** -0.8
        direction = np.zeros_like(g)
        for index in np.ndindex(*[spec.shape[i] for i in outer]):
            where = [slice(None)] * g.ndim
            for dim, i in zip(outer, index):
                where[dim] = i
            unit = g[tuple(where)]
            squared = unit**2 + config.epsilon
            if unit.ndim == 2:
                row, column = moments.get(index, (0.0, 0.0))
                row = decay * row + (1 - decay) * squared.mean(1)
                column = decay * column + (1 - decay) * squared.mean(0)
                moments[index] = (row, column)
                second = np.outer(row, column) / row.mean()
            else:
                second = decay * moments.get(index, 0.0) + (1 - decay) * squared
                moments[index] = second
            direction[tuple(where)] = unit / np.sqrt(second)
        direction /= max(1.0, np.sqrt((direction**2).mean()) / config.clip)
        rate = config.scale / np.sqrt(max(t, config.peak_step))
        if config.warmup_steps:
            rate *= min(1.0, (t + 1) / config.warmup_steps)
        param = param - rate * max(np.sqrt((param**2).mean()), config.smallest_size) * direction
    return param


@pytest.mark.parametrize("config", [Adafactor(peak_step=4), Adafactor(0.5, peak_step=2, warmup_steps=3, clip=0.3)])
def test_update_equals_the_sequential_transcription(config):
    rng = np.random.default_rng(0)
    params = random_tree(rng)
    params["experts"]["wi"][1] *= 30.0  # layers of unequal size: their steps must not mix
    params["final"] *= 0.0
    grads = [random_tree(rng, scale) for scale in (1.0, 1e-4, 7.0, 0.3, 2.0)]

    now, state = params, optimizer.init(SPECS)
    step = jax.jit(lambda g, s, p, t: optimizer.update(g, s, p, t, SPECS, config))
    for t, g in enumerate(grads):
        now, state = step(g, state, now, t)

    for name, spec in leaves(SPECS).items():
        want = reference(spec, [leaves(g)[name] for g in grads], leaves(params)[name], config)
        np.testing.assert_allclose(leaves(now)[name], want, rtol=2e-5, atol=2e-6, err_msg=name)


def test_agrees_with_optax_on_a_plain_matrix():
    optax = pytest.importorskip("optax")
    rng = np.random.default_rng(1)
    specs = {"w": Param((128, 160), ("model", "hidden"))}
    params = {"w": rng.standard_normal((128, 160)).astype(np.float32)}
    theirs = optax.adafactor(learning_rate=lambda t: optimizer.learning_rate(t, Adafactor(peak_step=3)))
    ours, mine = params, optimizer.init(specs)
    other, yours = params, theirs.init(params)
    for t in range(6):
        g = {"w": (10.0 ** (t - 3)) * rng.standard_normal((128, 160)).astype(np.float32)}
        ours, mine = optimizer.update(g, mine, ours, t, specs, Adafactor(peak_step=3))
        change, yours = theirs.update(g, yours, other)
        other = optax.apply_updates(other, change)
        np.testing.assert_allclose(ours["w"], other["w"], rtol=1e-5, atol=1e-6)


def test_learning_rate_is_flat_then_falls_with_the_square_root():
    for config, rates in (
        (Adafactor(), {0: 0.01, 10_000: 0.01, 40_000: 0.005}),
        (Adafactor(peak_step=100, warmup_steps=10), {0: 0.01, 9: 0.1, 50: 0.1}),
        (
            Adafactor(peak_step=100, steps=100, cooldown_steps=20),
            {0: 0.1, 79: 0.1, 80: 0.1, 90: 0.05, 99: 0.005, 100: 0.0, 200: 0.0},
        ),
    ):
        found = [float(optimizer.learning_rate(t, config)) for t in rates]
        np.testing.assert_allclose(found, list(rates.values()), rtol=1e-5)
