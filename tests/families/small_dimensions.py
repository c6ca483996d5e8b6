"""Dimensions smaller than the mesh: batches, heads, channels and experts of which there are fewer than devices.

Half the devices, or more, have nothing of what the marks split. A plan may leave them idle, let them compute what
others do, or split something else over them. These programs are measured like all others, in a table of their own.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from families.case import CUBE, GRID, LINE, Family, Whole
from families.layers import norm

CASES = Family("small")
THREE = {"x": 3}


def put(x, *entries):
    """A mark with a PartitionSpec; parts may be unequal, and some empty."""
    return gshard.shard(x, P(*entries))


def adam(p, g):
    return jax.tree.map(lambda w, d: w - 1e-3 * d / (jnp.abs(d) + 1e-8), p, g)


def trained(loss, **marks):
    """A step of training: new weights, of which the first argument is a pytree."""
    loss = functools.partial(loss, **marks) if marks else loss

    @functools.wraps(loss)
    def step(p, *batch):
        return adam(p, jax.grad(loss)(p, *batch))

    return step


# A vision Transformer with linear attention: 4 images, 3 heads.
VIT = {
    "patch": (48, 96), "out": (96, 10),
    "layers": [{"qkv": (96, 3, 3, 32), "o": (3, 32, 96), "up": (96, 384), "down": (384, 96)} for _ in range(2)],
}  # fmt: skip


def linear_vit(p, images, *, batch="x", heads=None, hidden=None):
    b, h, w, c = images.shape
    x = put(images, batch).reshape(b, h // 4, 4, w // 4, 4, c).transpose(0, 1, 3, 2, 4, 5)
    x = put(x.reshape(b, h * w // 16, 16 * c) @ p["patch"], batch)
    for own in p["layers"]:
        q, k, v = jnp.moveaxis(jnp.einsum("bsm,mthd->btshd", norm(x), put(own["qkv"], None, None, heads)), 1, 0)
        q, k = jax.nn.softmax(q, -1), jax.nn.softmax(k, 1)
        context = jnp.einsum("bshd,bshe->bhde", k, v)
        x = x + jnp.einsum("bshe,hem->bsm", jnp.einsum("bshd,bhde->bshe", q, context), put(own["o"], heads))
        x = put(x + jax.nn.gelu(norm(x) @ put(own["up"], None, hidden)) @ put(own["down"], hidden), batch)
    return norm(x).mean(1) @ p["out"]


def linear_vit_loss(p, images, labels, **marks):
    logits = linear_vit(p, images, **marks)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


IMAGES = (4, 64, 64, 3)
CASES.add(LINE, VIT, IMAGES, name="linear_vit")(linear_vit)
CASES.add(LINE, VIT, IMAGES, Whole((4,), 10), name="linear_vit_step")(trained(linear_vit_loss))
MODEL = {"batch": None, "heads": "x", "hidden": "x"}
CASES.add(LINE, VIT, IMAGES, Whole((4,), 10), name="linear_vit_heads_step")(trained(linear_vit_loss, **MODEL))
BOTH = {"batch": "x", "heads": "y", "hidden": "y"}
CASES.add(GRID, VIT, IMAGES, Whole((4,), 10), name="linear_vit_both_step")(trained(linear_vit_loss, **BOTH))
CASES.add(THREE, VIT, IMAGES, name="linear_vit_on_three")(linear_vit)


# A Fourier neural operator: 4 fields, 20 channels, 12 modes.
FNO = {
    "lift": (3, 20), "first": (20, 128), "last": (128, 1),
    "layers": [{"r": (20, 20, 12, 12), "i": (20, 20, 12, 12), "w": (20, 20)} for _ in range(3)],
}  # fmt: skip


def neural_operator(p, fields, *, batch="x", channels=None):
    modes = 12
    x = put(put(fields, batch) @ p["lift"], batch, None, None, channels)
    for own in p["layers"]:
        spectrum = jnp.fft.rfft2(x, axes=(1, 2))
        weights = put(own["r"], None, channels) + 1j * put(own["i"], None, channels)
        low = jnp.einsum("bxyi,ioxy->bxyo", spectrum[:, :modes, :modes], weights)
        mixed = jnp.zeros_like(spectrum).at[:, :modes, :modes].set(low)
        x = jax.nn.gelu(jnp.fft.irfft2(mixed, s=x.shape[1:3], axes=(1, 2)) + x @ own["w"])
        x = put(x, batch, None, None, channels)
    return jax.nn.gelu(x @ p["first"]) @ p["last"]


def neural_operator_loss(p, fields, targets, **marks):
    return jnp.mean((neural_operator(p, fields, **marks) - targets) ** 2)


FIELDS, TARGETS = (4, 64, 64, 3), (4, 64, 64, 1)
CASES.add(LINE, FNO, FIELDS, name="neural_operator")(neural_operator)
CASES.add(LINE, FNO, FIELDS, TARGETS, name="neural_operator_step")(trained(neural_operator_loss))
CASES.add(GRID, FNO, FIELDS, TARGETS, name="neural_operator_both_step")(trained(neural_operator_loss, channels="y"))
CASES.add(THREE, FNO, FIELDS, TARGETS, name="neural_operator_on_three_step")(trained(neural_operator_loss))


# A protein language model: axial attention over an alignment, triangle multiplication and attention over pairs.
PROTEIN = {
    "pair": (32, 16), "triangle": {"a": (16, 32), "b": (16, 32), "o": (32, 16)},
    "row": {"qkv": (32, 3, 4, 8), "bias": (16, 4), "o": (4, 8, 32)}, "column": {"qkv": (32, 3, 4, 8), "o": (4, 8, 32)},
    "around": {"qkv": (16, 3, 2, 8), "bias": (16, 2), "o": (2, 8, 16)}, "up": (32, 128), "down": (128, 32),
    "out": (32, 21),
}  # fmt: skip


def axial(x, p, bias=None, heads=None):
    q, k, v = jnp.moveaxis(jnp.einsum("brsm,mthd->btrshd", norm(x), put(p["qkv"], None, None, heads)), 1, 0)
    scores = jnp.einsum("brihd,brjhd->brhij", q, k) / 3
    weights = jax.nn.softmax(scores if bias is None else scores + bias)
    return jnp.einsum("brihd,hdm->brim", jnp.einsum("brhij,brjhd->brihd", weights, v), put(p["o"], heads))


def protein(p, alignment, *, batch="x", heads=None):
    x = put(alignment, batch)  # [batch, sequences, residues, features]
    pair = jnp.einsum("bsim,bsjm->bijm", x, x) @ p["pair"]
    left, right = (jax.nn.sigmoid(pair @ p["triangle"][k]) for k in "ab")
    pair = put(pair + norm(jnp.einsum("bikc,bjkc->bijc", left, right)) @ p["triangle"]["o"], batch)
    around = jnp.einsum("bijc,ch->bhij", pair, p["around"]["bias"])[:, None]
    pair = pair + axial(pair, p["around"], around)
    x = x + axial(x, p["row"], jnp.einsum("bijc,ch->bhij", pair, p["row"]["bias"])[:, None], heads)
    x = x + jnp.swapaxes(axial(jnp.swapaxes(x, 1, 2), p["column"], None, heads), 1, 2)
    x = put(x + jax.nn.relu(norm(x) @ p["up"]) @ p["down"], batch)
    return norm(x) @ p["out"], pair


def protein_loss(p, alignment, residues, **marks):
    logits, pair = protein(p, alignment, **marks)
    wanted = jax.nn.one_hot(residues, 21)
    return -(jax.nn.log_softmax(logits) * wanted).mean() + 1e-3 * jnp.square(pair).mean()


ALIGNMENT, RESIDUES = (2, 8, 48, 32), Whole((2, 8, 48), 21)
CASES.add(LINE, PROTEIN, ALIGNMENT, name="protein")(protein)
CASES.add(LINE, PROTEIN, ALIGNMENT, RESIDUES, name="protein_step")(trained(protein_loss))
CASES.add(LINE, PROTEIN, ALIGNMENT, RESIDUES, name="protein_heads_step")(trained(protein_loss, batch=None, heads="x"))
CASES.add(CUBE, PROTEIN, ALIGNMENT, RESIDUES, name="protein_on_cube_step")(
    trained(protein_loss, batch=("x", "y"), heads="z")
)


# Vorticity on a torus: an ensemble of 4, advanced in Fourier space by a loop.
def vorticity(fields, *, batch="x", rows=None):
    n = fields.shape[1]
    kx, ky = jnp.fft.fftfreq(n, 1 / n)[:, None], jnp.fft.rfftfreq(n, 1 / n)[None, :]
    square = kx**2 + ky**2
    inverse, kept = jnp.where(square == 0, 0.0, 1 / jnp.where(square == 0, 1.0, square)), square < (n / 3) ** 2

    def rate(w):
        stream = w * inverse
        u, v, wx, wy = (jnp.fft.irfft2(a) for a in (1j * ky * stream, -1j * kx * stream, 1j * kx * w, 1j * ky * w))
        return -jnp.fft.rfft2(u * wx + v * wy) * kept - 1e-3 * square * w

    def advance(w, _):
        half = w + 5e-3 * rate(w)
        return w + 1e-2 * rate(half), None

    w = jnp.fft.rfft2(put(fields, batch, rows))
    w, _ = jax.lax.scan(advance, w, None, length=6)
    return put(jnp.fft.irfft2(w), batch, rows)


CASES.add(LINE, (4, 64, 64), gradient=(0,), name="vorticity")(vorticity)
CASES.add(GRID, (3, 64, 64), name="vorticity_both")(functools.partial(vorticity, batch="y", rows="x"))
CASES.add(THREE, (4, 64, 64), name="vorticity_on_three")(vorticity)
CASES.add(LINE, (1, 64, 64), name="vorticity_of_one")(vorticity)


# A U-Net: 4 images, 6 channels.
UNET = {
    "in": (3, 3, 3, 6), "down": (3, 3, 6, 12), "middle": (3, 3, 12, 12), "up": (3, 3, 12, 6), "out": (3, 3, 12, 1),
}  # fmt: skip


def convolved(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def unet(p, images, *, batch="x", channels=None):
    x = jax.nn.relu(convolved(put(images, batch), put(p["in"], None, None, None, channels)))
    low = jax.nn.relu(convolved(x, put(p["down"], None, None, None, channels), 2))
    low = put(jax.nn.relu(convolved(low, p["middle"])), batch, None, None, channels)
    up = jnp.repeat(jnp.repeat(convolved(low, p["up"]), 2, 1), 2, 2)
    return put(convolved(jnp.concatenate([x, up], -1), p["out"]), batch)


def unet_loss(p, images, targets, **marks):
    return jnp.square(unet(p, images, **marks) - targets).mean()


CASES.add(LINE, UNET, (4, 32, 32, 3), (4, 32, 32, 1), name="unet_step")(trained(unet_loss))
CASES.add(GRID, UNET, (4, 32, 32, 3), (4, 32, 32, 1), name="unet_both_step")(
    trained(unet_loss, batch="x", channels="y")
)
CASES.add(THREE, UNET, (4, 32, 32, 3), name="unet_on_three")(unet)


# A graph network: 4 graphs, or 6 features.
GRAPH = {"message": (12, 24), "self": (6, 24), "out": (24, 6)}


def graph_network(p, nodes, edges, *, batch="x", features=None):
    def one(x, e):
        for _ in range(2):
            messages = jax.nn.relu(jnp.concatenate([x[e[:, 0]], x[e[:, 1]]], -1) @ p["message"])
            x = jax.nn.relu(jax.ops.segment_sum(messages, e[:, 1], x.shape[0]) + x @ p["self"]) @ p["out"]
        return x

    return jax.vmap(one)(put(nodes, batch, None, features), put(edges, batch))


def graph_network_loss(p, nodes, edges, **marks):
    return jnp.square(graph_network(p, nodes, edges, **marks)).mean()


CASES.add(LINE, GRAPH, (4, 64, 6), Whole((4, 256, 2), 64), name="graphs_step")(trained(graph_network_loss))
CASES.add(GRID, GRAPH, (3, 64, 6), Whole((3, 256, 2), 64), name="graphs_both_step")(
    trained(graph_network_loss, batch="x", features="y")
)


# An LSTM: 4 sequences.
LSTM = {"x": (32, 192), "h": (48, 192), "out": (48, 32)}


def lstm(p, sequences, *, batch="x", hidden=None):
    wx, wh = put(p["x"], None, hidden), put(p["h"], None, hidden)

    def round_of(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ wx + h @ wh, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((sequences.shape[0], 48))
    _, h = jax.lax.scan(round_of, (zero, zero), jnp.swapaxes(put(sequences, batch), 0, 1))
    return jnp.swapaxes(h, 0, 1) @ p["out"]


def lstm_loss(p, sequences, **marks):
    return jnp.square(lstm(p, sequences[:, :-1], **marks) - sequences[:, 1:]).mean()


CASES.add(LINE, LSTM, (4, 17, 32), name="lstm_step")(trained(lstm_loss))
CASES.add(GRID, LSTM, (1, 17, 32), name="lstm_both_step")(trained(lstm_loss, batch="x", hidden="y"))


# A mixture of 3 experts, 4 sequences.
EXPERTS = {"gate": (64, 3), "up": (3, 64, 128), "down": (3, 128, 64)}


def experts(p, tokens, *, batch="x", expert=None):
    x = put(tokens, batch)
    gates = jax.nn.softmax(x @ p["gate"])
    place = jnp.cumsum(jax.nn.one_hot(jnp.argmax(gates, -1), 3), 1)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 3)
    slots = jax.nn.one_hot((place * chosen).sum(-1).astype(jnp.int32) - 1, 24)
    dispatch = chosen[..., None] * slots[:, :, None]
    own = put(jnp.einsum("bsec,bsm->ebcm", dispatch, x), expert)
    h = jax.nn.gelu(jnp.einsum("ebcm,emh->ebch", own, put(p["up"], expert)))
    y = put(jnp.einsum("ebch,ehm->ebcm", h, put(p["down"], expert)), expert)
    return put(jnp.einsum("bsec,ebcm->bsm", dispatch * gates[..., None], y), batch)


def experts_loss(p, tokens, **marks):
    return jnp.square(experts(p, tokens, **marks) - tokens).mean()


CASES.add(LINE, EXPERTS, (4, 64, 64), name="experts_step")(trained(experts_loss))
CASES.add(LINE, EXPERTS, (8, 64, 64), name="experts_expert_step")(trained(experts_loss, expert="x"))
CASES.add(GRID, EXPERTS, (4, 64, 64), name="experts_both_step")(trained(experts_loss, batch="x", expert="y"))


# A diffusion step: noise is predicted by a small Transformer; 4 images.
DENOISER = {
    "in": (12, 64), "time": (16, 64), "qkv": (64, 3, 4, 16), "o": (4, 16, 64), "up": (64, 256), "down": (256, 64),
    "out": (64, 12),
}  # fmt: skip


def denoised(p, x, t, *, batch="x", heads=None, hidden=None):
    phase = t[:, None] * 2.0 ** jnp.arange(8)
    when = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1) @ p["time"]
    x = put(x @ p["in"] + when[:, None], batch)
    q, k, v = jnp.moveaxis(jnp.einsum("bsm,mthd->btshd", norm(x), put(p["qkv"], None, None, heads)), 1, 0)
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / 4)
    x = x + jnp.einsum("bihd,hdm->bim", jnp.einsum("bhij,bjhd->bihd", weights, v), put(p["o"], heads))
    x = put(x + jax.nn.gelu(norm(x) @ put(p["up"], None, hidden)) @ put(p["down"], hidden), batch)
    return x @ p["out"]


def diffusion_loss(p, clean, noise, t, **marks):
    level = jax.nn.sigmoid(t)[:, None, None]
    return jnp.square(denoised(p, jnp.sqrt(level) * clean + jnp.sqrt(1 - level) * noise, t, **marks) - noise).mean()


def sampled(p, noise, **marks):
    """Some steps from noise to an image."""

    def step(i, x):
        return x - 0.1 * denoised(p, x, jnp.full(x.shape[:1], 1.0 * i), **marks)

    return jax.lax.fori_loop(0, 4, step, noise)


PATCHES = (4, 64, 12)
CASES.add(LINE, DENOISER, PATCHES, PATCHES, (4,), name="diffusion_step")(trained(diffusion_loss))
CASES.add(CUBE, DENOISER, PATCHES, PATCHES, (4,), name="diffusion_on_cube_step")(
    trained(diffusion_loss, batch=("x", "y"), heads="z", hidden="z")
)
CASES.add(LINE, DENOISER, (1, 64, 12), name="sampled_batch_1")(sampled)
CASES.add(GRID, DENOISER, (1, 64, 12), name="sampled_batch_1_both")(
    functools.partial(sampled, batch="x", heads="y", hidden="y")
)
CASES.add(LINE, DENOISER, (1, 64, 12), name="sampled_heads")(
    functools.partial(sampled, batch=None, heads="x", hidden="x")
)
