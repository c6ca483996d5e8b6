"""Adafactor against a numpy transcription that loops over layers and experts, and against optax where both agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import Param
from gshard_m4 import optimizer
from gshard_m4.optimizer import Adafactor

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
    return jax.tree.map(
        lambda spec: scale * rng.standard_normal(spec.shape).astype(np.float32),
        SPECS,
        is_leaf=lambda x: hasattr(x, "dims"),
    )


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


@pytest.mark.parametrize(
    "config", [Adafactor(peak_step=4), Adafactor(peak_step=2, warmup_steps=3, scale=0.5, clip=0.3)]
)
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


def test_state_never_averages_over_layers_or_experts():
    shapes = {name: {k: v.shape for k, v in m.items()} for name, m in leaves(optimizer.init(SPECS)).items()}
    assert shapes["experts/wi"] == {"row": (3, 8, 4), "column": (3, 8, 5)}
    assert shapes["experts/bias"] == {"full": (3, 8, 5)}
    assert shapes["router"] == {"full": (3, 4, 8)}
    assert shapes["scale"] == {"full": (3, 4)}
    assert shapes["wq"] == {"row": (3, 4, 2), "column": (3, 2, 6)}
    assert shapes["embedding"] == {"row": (11,), "column": (4,)}
    assert shapes["final"] == {"full": (4,)}


def test_agrees_with_optax_on_a_plain_matrix():
    optax = pytest.importorskip("optax")
    rng = np.random.default_rng(1)
    specs = {"w": Param((128, 160), ("model", "hidden"))}
    params = {"w": rng.standard_normal((128, 160)).astype(np.float32)}
    theirs = optax.adafactor(
        learning_rate=lambda t: optimizer.learning_rate(t, Adafactor(peak_step=3)),
        decay_rate=0.8,
        momentum=None,
        weight_decay_rate=None,
        clipping_threshold=1.0,
        multiply_by_parameter_scale=True,
    )
    ours, mine = params, optimizer.init(specs)
    other, yours = params, theirs.init(params)
    for t in range(6):
        g = {"w": (10.0 ** (t - 3)) * rng.standard_normal((128, 160)).astype(np.float32)}
        ours, mine = optimizer.update(g, mine, ours, t, specs, Adafactor(peak_step=3))
        change, yours = theirs.update(g, yours, other)
        other = optax.apply_updates(other, change)
        np.testing.assert_allclose(ours["w"], other["w"], rtol=1e-5, atol=1e-6)


def test_learning_rate_is_flat_then_falls_with_the_square_root():
    paper = [float(optimizer.learning_rate(t)) for t in (0, 10_000, 40_000)]
    np.testing.assert_allclose(paper, [0.01, 0.01, 0.005], rtol=1e-6)
    warm = Adafactor(peak_step=100, warmup_steps=10)
    np.testing.assert_allclose(
        [float(optimizer.learning_rate(t, warm)) for t in (0, 9, 50)], [0.01, 0.1, 0.1], rtol=1e-6
    )
    cool = Adafactor(peak_step=100, steps=100, cooldown_steps=20)
    np.testing.assert_allclose(
        [float(optimizer.learning_rate(t, cool)) for t in (0, 79, 80, 90, 99, 100, 200)],
        [0.1, 0.1, 0.1, 0.05, 0.005, 0.0, 0.0], rtol=1e-5,
    )  # fmt: skip


def test_low_precision_parameters_keep_their_type():
    specs = {"w": Param((4, 4), ("model", "hidden"))}
    params = {"w": jnp.asarray(np.random.default_rng(2).standard_normal((4, 4)), jnp.bfloat16)}
    new, state = optimizer.update(params, optimizer.init(specs), params, 0, specs)
    assert new["w"].dtype == jnp.bfloat16
    assert {m.dtype for m in state["w"].values()} == {jnp.dtype(jnp.float32)}
