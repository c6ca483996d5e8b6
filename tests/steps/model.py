"""Model: a Transformer in the structures of today's training code: layers in a loop or written out, with constraints.

Weights are pytrees of float32 or bfloat16 arrays. Every weight has names of dimensions, and the rules of a ``Layout``
say which mesh axes these are split over, as in MaxText, Flax and Levanter. Layers are stacked along dimension 0, along
dimension 1 (MaxText's default), or not at all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

REMAT = {
    "full": None,
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("query", "mixed"),
}
FAR = -1e9  # a score that is masked


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes and the structure of a model.

    Attributes:
        layers, model, heads, groups, hidden: numbers of layers, of features, of query heads, of key and value heads,
            and of units of the feed-forward layers.
        words: of the vocabulary; of classes, where ``patch`` is given.
        stacked: the dimension along which the weights of all layers are stacked; None for layers that are written out.
        weights, numbers: dtypes of the weights and of what is computed.
        remat: a key of ``REMAT``; an empty string recomputes nothing.
        experts: of each feed-forward layer, two of which a token takes; 0 for one feed-forward layer.
        tied: whether the embedding is the last layer, too.
        softcap: the bound of scores and logits; 0.0 for none.
        window: how far every second layer looks back; 0 for all the way.
        patch: values of a patch of an image; 0 for a language model.
        stages: of a pipeline; each takes as many layers.
    """

    layers: int = 4
    model: int = 64
    heads: int = 8
    groups: int = 8
    hidden: int = 128
    words: int = 256
    stacked: int | None = 0
    weights: str = "float32"
    numbers: str = "float32"
    remat: str = "full"
    experts: int = 0
    tied: bool = False
    softcap: float = 0.0
    window: int = 0
    patch: int = 0
    stages: int = 0

    @property
    def dims(self):
        """Names and sizes of the dimensions of every weight, those of a layer without the stack."""
        m, h, g, k, f, v = self.model, self.heads, self.groups, self.model // self.heads, self.hidden, self.words
        layer = {
            "norm1": {"norm": m}, "norm2": {"norm": m},
            "query": {"embed": m, "heads": h, "head": k}, "key": {"embed": m, "groups": g, "head": k},
            "value": {"embed": m, "groups": g, "head": k}, "out": {"heads": h, "head": k, "embed": m},
        }  # fmt: skip
        if self.experts:
            layer |= {"router": {"embed": m, "choices": self.experts}}
            layer |= {n: {"expert": self.experts, "embed": m, "mlp": f} for n in ("gate", "up")}
            layer |= {"down": {"expert": self.experts, "mlp": f, "embed": m}}
        else:
            layer |= {"gate": {"embed": m, "mlp": f}, "up": {"embed": m, "mlp": f}, "down": {"mlp": f, "embed": m}}
        found = {"norm": {"norm": m}}
        if self.stacked is None:
            found["layers"] = [layer] * self.layers
        else:
            found["layers"] = {name: self._stacked(dims) for name, dims in layer.items()}
        if self.patch:
            return {**found, "embed": {"values": self.patch, "embed": m}, "head": {"embed": m, "vocab": v}}
        found["embed"] = {"vocab": v, "embed": m}
        return found if self.tied else {**found, "head": {"embed": m, "vocab": v}}

    def _stacked(self, dims):
        if self.stages:
            return {"stage": self.stages, "layer": self.layers // self.stages, **dims}
        items = list(dims.items())
        items.insert(self.stacked or 0, ("layer", self.layers))
        return dict(items)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes the dimensions of weights and of activations are split over."""

    mesh: jax.sharding.Mesh
    rules: Mapping[str, Any]

    def spec(self, names):
        """The ``PartitionSpec`` of an array with these dimensions; an axis that is used already is left out."""
        used = set()
        entries = []
        for name in names:
            wanted = self.rules.get(name) or ()
            axes = tuple(a for a in ((wanted,) if isinstance(wanted, str) else wanted) if a not in used)
            used.update(axes)
            entries.append(axes or None)
        return P(*entries)

    def sharding(self, names):
        """The same as a ``NamedSharding``."""
        return NamedSharding(self.mesh, self.spec(names))

    def hold(self, x, names):
        """A sharding constraint on an activation whose dimensions have these names."""
        return jax.lax.with_sharding_constraint(x, self.sharding(names.split()))


def is_dims(node):
    """Whether a node is the names and sizes of one weight's dimensions."""
    return isinstance(node, dict) and bool(node) and all(isinstance(n, int) for n in node.values())


def norm(x, scale):
    """RMS normalization in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)


def rotated(x):
    """Rotary positions of [batch, length, heads, head]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def capped(x, bound):
    """Scores within plus and minus ``bound``, smoothly."""
    return bound * jnp.tanh(x / bound) if bound else x


def attention(c, hold, w, x, local):
    """Causal attention (of patches: to all) with groups of query heads, on [batch, length, embed]."""
    named = checkpoint_name
    q = named(hold(jnp.einsum("blm,mhk->blhk", x, w["query"]), "batch length heads head"), "query")
    k, v = (hold(jnp.einsum("blm,mgk->blgk", x, w[n]), "batch keys groups head") for n in ("key", "value"))
    if not c.patch:
        q, k = rotated(q), rotated(k)
    q = q.reshape(*q.shape[:2], c.groups, c.heads // c.groups, q.shape[-1])
    scores = jnp.einsum("blghk,bsgk->bghls", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    at = jnp.arange(x.shape[1])
    back = at[:, None] - at[None, :]
    seen = (back >= 0) & (~local | (back < c.window)) if c.window else back >= (-len(at) if c.patch else 0)
    weights = jax.nn.softmax(jnp.where(seen, capped(scores, c.softcap), FAR), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bghls,bsgk->blghk", weights, v).reshape(*x.shape[:2], c.heads, -1)
    return jnp.einsum("blhk,hkm->blm", named(mixed, "mixed"), w["out"])


def feed_forward(hold, w, x):
    """A gated feed-forward layer on [batch, length, embed]."""
    h = jax.nn.silu(x @ w["gate"]) * (x @ w["up"])
    return hold(h, "batch length mlp") @ w["down"]


def mixture(c, hold, w, x):
    """Two experts for each token, as einsums over places of a limited number, per sentence."""
    length = x.shape[1]
    places = 2 * 2 * length // c.experts
    gates = jax.nn.softmax((x @ w["router"]).astype(jnp.float32), axis=-1)
    chosen, which = jax.lax.top_k(gates, 2)
    one_hot = jax.nn.one_hot(which, c.experts, dtype=jnp.int32)  # b l 2 e
    rank = jnp.cumsum(one_hot.reshape(x.shape[0], 2 * length, c.experts), axis=1).reshape(one_hot.shape) - one_hot
    place = jnp.sum(rank * one_hot, axis=-1)
    slots = one_hot[..., None] * jax.nn.one_hot(place, places, dtype=jnp.int32)[..., None, :]
    combine = jnp.einsum("bln,blnep->blep", chosen, slots.astype(jnp.float32)).astype(x.dtype)
    sent = hold(jnp.einsum("blep,blm->ebpm", (combine > 0).astype(x.dtype), x), "expert batch places embedded")
    h = jax.nn.silu(jnp.einsum("ebpm,emf->ebpf", sent, w["gate"])) * jnp.einsum("ebpm,emf->ebpf", sent, w["up"])
    made = hold(jnp.einsum("ebpf,efm->ebpm", h, w["down"]), "expert batch places embedded")
    return jnp.einsum("blep,ebpm->blm", combine, made)


def layer(c, hold, w, x, local):
    """One layer on [batch, length, embed]."""
    x = hold(x, "batch length embedded")
    x = x + attention(c, hold, w, norm(x, w["norm1"]), local)
    x = hold(x, "batch length embedded")
    y = norm(x, w["norm2"])
    return x + (mixture(c, hold, w, y) if c.experts else feed_forward(hold, w, y))


def through_layers(c, hold, weights, x):
    """All layers: in a loop over a stack, or one after the other."""

    def one(x, each):
        return layer(c, hold, *each[:1], x, each[1]), None

    run = jax.checkpoint(one, policy=REMAT[c.remat]) if c.remat else one
    local = jnp.arange(c.layers) % 2 == 0
    if c.stacked is None:
        for i, w in enumerate(weights):
            x, _ = run(x, (w, local[i]))
        return x
    if c.stacked:
        weights = jax.tree.map(lambda w: jnp.moveaxis(w, c.stacked, 0), weights)
    return jax.lax.scan(run, x, (weights, local))[0]


def through_stages(c, layout, weights, x, parts):
    """All layers, as a pipeline: ``parts`` parts of the batch move from stage to stage, one in each round."""

    def stage(w, x):
        own = dataclasses.replace(c, layers=c.layers // c.stages, stages=0)
        return through_layers(own, lambda x, names: x, w, x)

    batch = x.shape[0] // parts
    waiting = x.reshape(batch, parts, *x.shape[1:]).swapaxes(0, 1)
    waiting = layout.hold(jnp.pad(waiting, ((0, c.stages - 1), *((0, 0),) * 3)), "part batch length embedded")
    at = jnp.zeros((c.stages, batch, *x.shape[1:]), x.dtype)

    def round_(at, new):
        at = layout.hold(jnp.roll(at, 1, axis=0).at[0].set(new), "stage batch length embedded")
        at = layout.hold(jax.vmap(stage)(weights, at), "stage batch length embedded")
        return at, at[-1]

    _, done = jax.lax.scan(round_, at, waiting)
    return layout.hold(done[c.stages - 1 :], "part batch length embedded").swapaxes(0, 1).reshape(x.shape)


def loss(c, layout, weights, batch, parts=1):
    """The mean cross entropy of ``batch["labels"]``; scores are float32."""
    weights = jax.tree.map(lambda w: w.astype(c.numbers), weights)
    if c.patch:
        x = batch["inputs"].astype(c.numbers) @ weights["embed"]
    else:
        x = weights["embed"][batch["inputs"]]
    x = layout.hold(x, "batch length embedded")
    if c.stages:
        x = through_stages(c, layout, weights["layers"], x, parts)
    else:
        x = through_layers(c, layout.hold, weights["layers"], x)
    x = norm(x, weights["norm"])
    if c.patch:
        x = jnp.mean(x, axis=1, keepdims=True)
    scores = x @ (weights["embed"].T if c.tied else weights["head"])
    scores = capped(layout.hold(scores, "batch length vocab").astype(jnp.float32), c.softcap)
    picked = jnp.take_along_axis(scores, batch["labels"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - picked)
