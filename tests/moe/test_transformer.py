"""The whole model: causality, keys, padding, learning."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moe import TransformerConfig, forward, init, loss, param_specs
from moe import naive

DENSE = TransformerConfig(
    20, 18, model_dim=16, hidden_dim=24, heads=2, head_dim=8, encoder_layers=2, decoder_layers=2, dropout=0.0
)
MOE = dataclasses.replace(DENSE, experts=4, group_size=8)
DROPLESS = dataclasses.replace(MOE, capacity_factor=math.inf)

run = jax.jit(forward, static_argnums=0, compiler_options=naive.FAST)
run_loss = jax.jit(loss, static_argnums=0, static_argnames="label_smoothing", compiler_options=naive.FAST)
initial = jax.jit(init, static_argnums=0, compiler_options=naive.FAST)


@functools.partial(jax.jit, static_argnums=0, compiler_options=naive.FAST)
def gradient(config, params, batch, key):
    return jax.grad(lambda p: loss(config, p, batch, key=key)[0])(params)


def batch(seed=0, sentences=4, source_length=6, target_length=8):
    """Sentences of different lengths that end in 1, padded with 0."""
    rng = np.random.default_rng(seed)

    def side(vocabulary, length):
        ids = rng.integers(2, vocabulary, (sentences, length))
        for row, end in zip(ids, rng.integers(1, length, sentences), strict=True):
            row[end], row[end + 1 :] = 1, 0
        return jnp.asarray(ids, jnp.int32)

    return {"source": side(20, source_length), "target": side(18, target_length)}


def values(config):
    """Parameters, drawn by numpy: no program that draws them is compiled."""
    return naive.values(param_specs(config))


def drawn(config):
    """Parameters as a model starts with them."""
    return initial(config, jax.random.key(0))


def shifted(target_BL):
    return jnp.pad(target_BL, ((0, 0), (1, 0)))[:, :-1]


def test_no_position_sees_a_later_one():
    params = values(DROPLESS)
    source_BL = batch()["source"]
    target_BL = jnp.asarray(naive.ids(1, 18, 4, 8))
    logits_BLV, _ = run(DROPLESS, params, source_BL, target_BL)
    changed_BLV, _ = run(DROPLESS, params, source_BL, target_BL.at[:, 5].set(2 + (target_BL[:, 5] + 1) % 16))
    np.testing.assert_allclose(changed_BLV[:, :5], logits_BLV[:, :5], rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(changed_BLV[:, 5:] - logits_BLV[:, 5:]).max()) > 1e-2
    outside_BLV, _ = run(DROPLESS, params, source_BL.at[0, 0].set(20), target_BL)
    assert bool(jnp.isnan(outside_BLV[0]).any()), "an id outside of the vocabulary shows"


def test_padding_changes_nothing():
    """A longer, emptier batch of the same sentences has the same loss and metrics."""
    params, small = values(DROPLESS), batch(sentences=4)
    wide = jax.tree.map(lambda ids: jnp.pad(ids, ((0, 4), (0, 4))), small)
    _, expected = run_loss(DROPLESS, params, small)
    _, got = run_loss(dataclasses.replace(DROPLESS, group_size=4), params, wide)
    for name in set(expected) - {"aux_loss", "loss"}:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def packed(data, rows, source_length, target_length):
    """The same sentences, several to a row: sentence i in row i % rows."""
    out = {}
    for side, length in (("source", source_length), ("target", target_length)):
        block = np.zeros((rows, length), np.int32)
        at = [0] * rows
        for i, row in enumerate(np.asarray(data[side])):
            ids = row[: int((row != 0).sum())]
            block[i % rows, at[i % rows] : at[i % rows] + len(ids)] = ids
            at[i % rows] += len(ids)
        out[side] = jnp.asarray(block)
    return out


@pytest.mark.slow
def test_a_packed_batch_is_its_sentences():
    """Several sentences in a row have the loss, the gradients and the routing of rows of their own."""
    params = values(DROPLESS)
    data = batch(sentences=10)
    full = packed(data, 3, 28, 36)
    assert (np.asarray(full["target"]) == 1).sum(1).tolist() == [4, 3, 3]
    # The auxiliary loss is that of groups, which are others.
    small, large = (dataclasses.replace(DROPLESS, aux_weight=0.0, group_size=size) for size in (4, 12))
    (_, expected), (_, got) = run_loss(small, params, data), run_loss(large, params, full)
    for name in set(expected) - {"aux_loss"}:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    together, alone = gradient(large, params, full, None), gradient(small, params, data, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), together, alone)


@pytest.mark.parametrize("config, label_smoothing", [(DROPLESS, 0.1), (DENSE, 0.0)], ids=["moe", "dense"])
def test_loss_by_hand(config, label_smoothing):
    params, data = values(config), batch()
    given = {} if label_smoothing == 0.1 else {"label_smoothing": label_smoothing}
    value, metrics = run_loss(config, params, data, **given)
    logits_BLV, of_layers = run(config, params, data["source"], shifted(data["target"]))
    log_BLV = np.asarray(jax.nn.log_softmax(logits_BLV))
    target_BL = np.asarray(data["target"])
    picked = [log_BLV[b, i, target_BL[b, i]] for b, i in zip(*np.nonzero(target_BL), strict=True)]
    spread = [log_BLV[b, i].mean() for b, i in zip(*np.nonzero(target_BL), strict=True)]
    assert float(metrics["tokens"]) == len(picked)
    assert float(metrics["cross_entropy"]) == pytest.approx(-np.mean(picked), rel=1e-5)
    smoothed = -(1 - label_smoothing) * np.mean(picked) - label_smoothing * np.mean(spread)
    aux = 0.01 * 2 * float(of_layers["aux_loss"]) if config.experts else 0.0  # two MoE layers
    assert (float(value), float(metrics["loss"])) == (pytest.approx(smoothed + aux, rel=1e-5), float(value))


@pytest.mark.parametrize("rate", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_keys_decide_what_is_random(rate):
    """The same key gives the same result, another one another: second experts, and attention weights."""
    config = dataclasses.replace(DROPLESS, attention_dropout=rate)
    params, data = values(config), batch()
    first, again, other = (float(run_loss(config, params, data, key=jax.random.key(seed))[0]) for seed in (1, 1, 2))
    _, plain = run_loss(DROPLESS, params, data)
    assert (first, len({first, other, float(plain["loss"])})) == (again, 3)
    # Logits start with a variance near 1: cross entropy is about log V + 1/2.
    assert float(plain["cross_entropy"]) == pytest.approx(math.log(18) + 0.5, abs=0.7)


@pytest.mark.slow
def test_branches_are_recomputed_but_not_what_experts_are_sent():
    """The same gradients; on four devices what is sent to experts, and back, is sent forward and backward only."""
    config = dataclasses.replace(MOE, source_vocabulary=0, encoder_layers=0, dropout=0.1, partitions=4)
    params, data, key = values(config), batch(), jax.random.key(1)
    sent, found = {}, {}
    for remat in (True, "branches"):
        changed = dataclasses.replace(config, remat=remat)

        def of(params, changed=changed):
            return jax.grad(lambda p: loss(changed, p, data, key=key)[0])(params)

        found[remat] = gradient(changed, params, data, key)
        spmd = gshard.jit(of, mesh=gshard.Mesh.abstract(d=4)).lower(params).spmd
        sent[remat] = sum(c.times for c in spmd.collectives if c.kind == "all_to_all")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found.values())
    assert sent["branches"] == 4 * config.moe_layers <= sent[True] - 2 * config.moe_layers


@pytest.mark.parametrize("parameters, expected", [
    (values, 3.4241338), pytest.param(drawn, 3.4903502, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_papers_model_has_the_loss_it_always_had(parameters, expected):
    """With dropout, coins and drops: written down before there were other models."""
    config = dataclasses.replace(DENSE, decoder_layers=4, dropout=0.1, attention_dropout=0.1, experts=4,
        group_size=8, capacity_factor=1.0)  # fmt: skip
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(1, 20, (4, 6)), jnp.int32)
    target = jnp.asarray(rng.integers(1, 18, (4, 8)), jnp.int32).at[2, 5:].set(0)
    value, _ = run_loss(config, parameters(config), {"source": source, "target": target}, key=jax.random.key(1))
    assert float(value) == pytest.approx(expected, rel=2e-6)
