"""Routers, experts and a whole decoder as plain as can be: numpy, float64, one token after the other; and test data."""

import jax
import jax.numpy as jnp
import numpy as np

from gshard import moe

FAST = {"xla_backend_optimization_level": 0}  # small programs: compiling them costs more than running them


def value_and_gradients(config, key=None):
    """Of an expert layer: value, outputs and metrics, and gradients of parameters and inputs."""

    def run(params, x_BLM, valid_BL):
        direction_BLM = jnp.cos(jnp.arange(x_BLM.size, dtype=jnp.float32)).reshape(x_BLM.shape)
        outputs, metrics = moe.expert_layer(config, params, x_BLM, valid_BL, key=key)
        return jnp.sum(outputs * direction_BLM) + metrics["aux_loss"], (outputs, metrics)

    return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)


def on_one_device(config, arguments, key=None):
    return jax.jit(value_and_gradients(config, key), compiler_options=FAST)(*arguments)


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), left, right)


def values(specs, seed=0):
    """Values for a tree of ``Param``, drawn by numpy: nothing is compiled for them."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        if spec.init == "constant":
            return np.full(spec.shape, spec.scale, np.float32)
        return (spec.scale * rng.normal(size=spec.shape)).astype(np.float32)

    return jax.tree.map(draw, specs)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def case(config, rows=8, length=4, seed=0):
    """Of an expert layer: parameters, tokens, and which of these are no padding."""
    x_BLM = normal(seed + 1, rows, length, config.model_dim)
    return values(moe.expert_specs(config), seed), x_BLM, normal(seed + 2, rows, length) > -0.8


def ids(seed, vocabulary, *shape):
    return np.random.default_rng(seed).integers(2, vocabulary, shape).astype(np.int32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def float64(tree):
    if isinstance(tree, dict):
        return {name: float64(x) for name, x in tree.items()}
    return np.asarray(tree, np.float64)


def routed(logits_SE, k, gates="softmax", normalise=True, scale=1.0, bias_E=None):
    """For each token its k experts, the best first, and their weights."""
    logits_SE = np.asarray(logits_SE, np.float64)
    gates_SE = softmax(logits_SE) if gates == "softmax" else sigmoid(logits_SE)
    found = []
    for logits_E, gates_E in zip(logits_SE, gates_SE, strict=True):
        score_E = logits_E if bias_E is None else gates_E + bias_E
        experts = np.argsort(-score_E, kind="stable")[:k]
        weights = gates_E[experts]
        if normalise:
            weights = weights / weights.sum()
        found.append((experts, scale * weights))
    return found


def with_capacity(choices, valid_S, experts, capacity):
    """Which choices are kept, and their places: all first choices before all second ones, and so on."""
    taken_E = np.zeros(experts, int)
    kept = np.zeros((len(choices), len(choices[0][0])), bool)
    position = np.zeros_like(kept, int)
    for j in range(kept.shape[1]):
        for s, (chosen, _) in enumerate(choices):
            if valid_S[s]:
                position[s, j] = taken_E[chosen[j]]
                kept[s, j] = taken_E[chosen[j]] < capacity
                taken_E[chosen[j]] += 1
    return kept, position, taken_E


def kept_with_room(chosen_TK, valid_T, experts, partitions, room, group_size):
    """Which choices are kept where the experts of a partition share room; places follow groups, choices, then tokens.

    Experts of a partition have the same limit, the largest for which all fit.
    """
    of_expert = [[] for _ in range(experts)]
    for t, k in np.ndindex(*chosen_TK.shape):
        if valid_T[t]:
            of_expert[chosen_TK[t, k]].append((t // group_size, k, t))
    kept_TK = np.zeros(chosen_TK.shape, bool)
    for mine in np.split(np.arange(experts), partitions):
        sizes = [len(of_expert[e]) for e in mine]
        limit = max(n for n in range(room + 1) if sum(min(n, size) for size in sizes) <= room)
        for e in mine:
            for _, k, t in sorted(of_expert[e])[:limit]:
                kept_TK[t, k] = True
    return kept_TK


def feed_forward(params, x, activation):
    into = x @ params["wi"]
    if activation == "relu":
        return np.maximum(into, 0) @ params["wo"]
    gate = x @ params["wi_gate"]
    return (gate * sigmoid(gate) * into) @ params["wo"]


def expert_layer(config, params, x_TM):
    """Without a capacity: each token's experts, weighted, and the shared ones."""
    params = float64(params)
    choices = routed(
        x_TM @ params["wg"], config.top_k, config.gates, config.normalise_gates, config.gate_scale, params.get("bias")
    )
    out = np.zeros_like(x_TM)
    for t, (experts, weights) in enumerate(choices):
        for e, weight in zip(experts, weights, strict=True):
            own = {name: params[name][e] for name in ("wi", "wo", "wi_gate") if name in params}
            out[t] += weight * feed_forward(own, x_TM[t], config.activation)
        if config.shared_experts:
            out[t] += feed_forward(params["shared"], x_TM[t], config.activation)
    return out


def norm(scale, x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def turned(x_LND, base):
    """Rotary positions as a product of complex numbers."""
    L, _, D = x_LND.shape
    z = x_LND[..., : D // 2] + 1j * x_LND[..., D // 2 :]
    angle_LX = np.arange(L)[:, None] * base ** (-2 * np.arange(D // 2) / D)
    z = z * np.exp(1j * angle_LX)[:, None, :]
    return np.concatenate([z.real, z.imag], -1)


def attention(config, params, x_LM):
    """Causal, every head of queries with a copy of its keys and values."""
    q, k, v = (np.einsum("lm,mnd->lnd", x_LM, params[name]) for name in ("query", "key", "value"))
    q, k = turned(q, config.rotary_base), turned(k, config.rotary_base)
    out = np.zeros_like(q)
    for n in range(q.shape[1]):
        shared = n // (q.shape[1] // k.shape[1])
        for at in range(len(x_LM)):
            weights = softmax(k[: at + 1, shared] @ q[at, n])
            out[at, n] = weights @ v[: at + 1, shared]
    return np.einsum("lnd,ndm->lm", out, params["output"])


def decoder(config, params, ids_L):
    """Logits of one text, ``ids_L`` being what the decoder reads: 0 first, then the text shifted."""
    params = float64(params)
    x = params["target_embedding"][ids_L]
    for name, (kinds, number) in config.parts(config.decoder_layers).items():
        for i in range(number):
            for kind in kinds:
                layer = at_layer(params["decoder"][name][kind], i)
                x = x + attention(config, layer["attention"], norm(layer["attention_norm"], x))
                if kind == "sparse":
                    x = x + expert_layer(config, layer["experts"], norm(layer["experts_norm"], x))
                else:
                    inputs = norm(layer["feed_forward_norm"], x)
                    x = x + feed_forward(layer["feed_forward"], inputs, config.activation)
    x = norm(params["decoder"]["norm"], x) * config.model_dim**-0.5
    return x @ params["target_embedding" if config.tied_softmax else "softmax"].T


def at_layer(tree, i):
    return {name: at_layer(x, i) if isinstance(x, dict) else x[i] for name, x in tree.items()}
