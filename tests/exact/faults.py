"""Programs that people write with ``jax.shard_map``, each right and with seeded faults.

A program is a function of the name of a fault, "" if there is none, and of a mesh. It returns the function for one
device and the sharded one. The line on which the name of a fault stands is the line of the fault.
"""

import dataclasses
import inspect
import math
import re
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import all_gather, all_to_all, axis_index, pmax, pmean, ppermute, psum, psum_scatter
from jax.sharding import PartitionSpec as P

PROGRAMS = []


@dataclasses.dataclass(frozen=True)
class Program:
    """A program; ``axes`` are of its mesh, ``shapes`` of its arguments: "6,3", or "i5:4,2" for integers below 5."""

    function: Callable
    axes: str
    shapes: str

    @property
    def name(self):
        return self.function.__name__

    @property
    def faults(self):
        """The names of its faults."""
        return list(dict.fromkeys(re.findall(r'fault == "(\w+)"', inspect.getsource(self.function))))

    def versions(self, fault=""):
        """The function for one device, and the sharded one with this fault."""
        names, sizes = zip(*(axis.split("=") for axis in self.axes.split()), strict=True)
        sizes, types = tuple(map(int, sizes)), (jax.sharding.AxisType.Auto,) * len(sizes)
        devices = jax.devices()[: math.prod(sizes)]
        return self.function(fault, jax.make_mesh(sizes, names, axis_types=types, devices=devices))

    def arguments(self):
        """Numbers of the normal distribution, and integers."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def made(text):
            below, _, shape = text.rpartition(":")
            sizes = [int(n) for n in shape.split(",") if n]
            if below:
                return jnp.asarray(rng.integers(0, int(below[1:]), sizes), jnp.int32)
            return jnp.asarray(rng.standard_normal(sizes), jnp.float32)

        return [made(text) for text in self.shapes.split()]

    def lines(self, fault):
        """The lines of a fault, and those that are as right ("# or: ...").

        Where something is left out, these are where it is made or read. The equations of a rule for gradients have the
        line of the call; a number or a flag for a helper is used in it; JAX adds up gradients where a replicated
        argument is read.
        """
        sources = [inspect.getsourcelines(f) for f in (self.function, squares)]
        numbered = [(n, text) for lines, first in sources for n, text in enumerate(lines, first)]
        also = re.compile(rf"# or: .*\b{fault}\b")
        return {n for n, text in numbered if f'fault == "{fault}"' in text or also.search(text)}


def program(axes, shapes):
    """Enters a program: its mesh, and the shapes of its arguments."""
    return lambda function: PROGRAMS.append(Program(function, axes, shapes))


def manual(mesh, in_specs, out_specs, check=False):
    """``jax.shard_map`` as a decorator."""
    return lambda f: jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)


def ring(n, by=1):
    """Each device sends to the one that is so many further."""
    return [(i, (i + by) % n) for i in range(n)]


def squares(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)  # or: undivided


@program("data=4", "6,3 8,6 8,3")
def data_parallel_checked(fault, mesh):
    def step(w, x, y):
        value, g = jax.value_and_grad(squares)(w, x, y)
        return value, w - 0.1 * g

    @manual(mesh, (P(), P("data"), P("data")), (P(), P()), check=True)
    def sharded(w, x, y):
        value, g = jax.value_and_grad(squares)(w, x, y)  # JAX sums the gradient
        g = psum(g, "data") / 4 if fault == "again" else g if fault == "undivided" else g / 4
        return psum(value, "data") / (2 if fault == "half" else 4), w - 0.1 * g

    return step, sharded


@program("data=2 model=2", "6,4 4,3 8,6 8,3")
def gradient_from_outside(fault, mesh):
    def plain(u, w, x, y):
        return jax.grad(lambda u, w: squares(w, x @ u, y), (0, 1))(u, w)

    def sharded(u, w, x, y):
        @manual(mesh, (P(None, "model"), P("model"), P("data"), P("data")), P(), check=True)
        def loss(u, w, x, y):
            z = pmean(x @ u @ w, "model") if fault == "means" else psum(x @ u @ w, "model")
            z = jnp.tanh(psum(z, "model") if fault == "inner" else z)
            return psum(jnp.sum((z - y) ** 2), "data") / (y.size if fault == "scale" else 24)

        return jax.grad(lambda u, w: loss(u, w, x, y), (0, 1))(u, w)

    return plain, sharded


@program("data=4", "6,3 24,6 24,3")
def accumulation(fault, mesh):
    def plain(w, x, y):
        return jax.grad(squares)(w, x, y)

    @manual(mesh, (P(), P("data"), P("data")), P())
    def sharded(w, x, y):
        def one(total, part):
            g = jax.grad(squares)(w, *part)
            g = psum(g, "data") if fault == "both" else g
            return g if fault == "stale" else total + g, g

        first = w if fault == "start" else jnp.zeros_like(w)
        total, each = lax.scan(one, first, (x.reshape(3, 2, 6), y.reshape(3, 2, 3)))  # or: stale start
        total = each[-1] if fault == "last" else total
        return pmean(total / (2 if fault == "parts" else 3), "data")  # or: both last

    return plain, sharded


@program("data=2 model=4", "6,5 5,8 8,3 3 4,6 4,3")
def tensor_parallel(fault, mesh):
    @jax.custom_vjp
    def enter(x):
        return x

    def entered(_, g):
        return (g if fault == "entering" else psum(g, "model"),)

    @jax.custom_vjp
    def leave(x):
        return psum(x, "data" if fault == "axis" else "model")

    def left(_, g):
        return (psum(g, "model") if fault == "leaving" else g,)

    enter.defvjp(lambda x: (x, None), entered)
    leave.defvjp(lambda x: (leave(x), None), left)

    def plain(w0, w1, w2, b, x, y):
        def loss(w0, w1, w2, b):
            return jnp.mean((jnp.tanh(jnp.tanh(x @ w0) @ w1) @ w2 + b - y) ** 2)

        return jax.value_and_grad(loss, (0, 1, 2, 3))(w0, w1, w2, b)

    weights = P(), P(None, "model"), P("model"), P()

    @manual(mesh, (*weights, P("data"), P("data")), (P(), weights))
    def sharded(w0, w1, w2, b, x, y):
        def loss(w0, w1, w2, b):
            h = jnp.tanh(enter(jnp.tanh(x @ w0)) @ w1)  # or: entering batch
            z = leave(h @ w2 + b) if fault == "bias" else leave(h @ w2) + b  # or: leaving
            return jnp.mean((z - y) ** 2)

        value, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(w0, w1, w2, b)
        g0, g1, g2, gb = gradients if fault == "batch" else pmean(gradients, "data")  # or: entering
        return pmean(value, "data"), (g0, psum(g1, "data") if fault == "wide" else g1, g2, gb)

    return plain, sharded


@program("model=4", "2,5,6 6,24 6,6 6,6 24,6")
def attention_by_heads(fault, mesh):
    def attend(q, k, v, scale, seen):
        scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale, -jnp.inf)  # or: scale
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(2, 5, -1)

    def plain(x, wq, wk, wv, wo):
        k, v = (jnp.repeat((x @ w).reshape(2, 5, 2, 3), 4, 2) for w in (wk, wv))
        return attend((x @ wq).reshape(2, 5, 8, 3), k, v, 3**-0.5, jnp.tril(jnp.ones((5, 5), bool))) @ wo

    @manual(mesh, (P(), P(None, "model"), P(), P(), P("model")), P())
    def sharded(x, wq, wk, wv, wo):
        q = (x @ wq).reshape(2, 5, 3, 2).swapaxes(2, 3) if fault == "heads" else (x @ wq).reshape(2, 5, 2, 3)
        of = axis_index("model") % 2 if fault == "group" else axis_index("model") // 2
        k, v = (lax.dynamic_slice_in_dim((x @ w).reshape(2, 5, 2, 3), of, 1, 2) for w in (wk, wv))
        seen = jnp.tril(jnp.ones((5, 5), bool), 1 if fault == "mask" else 0)
        out = attend(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), (6 if fault == "scale" else 3) ** -0.5, seen)
        return out @ wo if fault == "sum" else psum(out @ wo, "model")

    return plain, sharded


@program("seq=4", "8,6 9,6 6 6,12 12,6")
def sequence_parallel(fault, mesh):
    def normed(h, scale):
        return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5) * scale  # or: norm

    def plain(x, places, scale, w1, w2):
        def loss(scale, w1, w2):
            return jnp.sum((x + jnp.tanh(normed(x + places[:8], scale) @ w1) @ w2) ** 2)

        return jax.grad(loss, (0, 1, 2))(scale, w1, w2)

    weights = P(), P(None, "seq"), P("seq")

    @manual(mesh, (P("seq"), P(), *weights), weights)
    def sharded(x, places, scale, w1, w2):
        def loss(scale, w1, w2):
            start = 0 if fault == "start" else axis_index("seq") * 2 + (1 if fault == "shift" else 0)
            h = normed(x + lax.dynamic_slice_in_dim(places, start, 2), scale)  # or: start
            h = all_gather(h, "seq", axis=1 if fault == "order" else 0).reshape(8, 6)
            out = jnp.tanh(h @ w1) @ w2  # or: part
            out = out.reshape(4, 2, 6)[0] if fault == "part" else psum_scatter(out, "seq", tiled=True)
            return jnp.sum((x + out) ** 2)

        g, g1, g2 = jax.grad(loss, (0, 1, 2))(scale, w1, w2)
        g = pmean(g, "seq") if fault == "mean" else g if fault == "norm" else psum(g, "seq")
        return g, g1, g2

    return plain, sharded


@program("data=2 vocab=4", "6,5 5,12 i12:6")
def vocabulary_loss(fault, mesh):
    def plain(x, w, labels):
        def loss(w):
            logits, counted = x @ w, labels > 4
            of = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            losses = jax.nn.logsumexp(logits, 1) - of
            return jnp.sum(jnp.where(counted, losses, 0)) / jnp.sum(counted)

        return jax.value_and_grad(loss)(w)

    def sharded(x, w, labels):
        @manual(mesh, (P("data"), P(None, "vocab"), P("data")), P())
        def loss(x, w, labels):
            logits, counted = x @ w, labels > (3 if fault == "pad" else 4)
            top = lax.stop_gradient(logits.max(1))  # or: shift
            top = top if fault == "shift" else pmax(top, "vocab")
            total = jnp.sum(jnp.exp(logits - top[:, None]), 1)  # or: denominator
            total = total if fault == "denominator" else psum(total, "vocab")
            at = labels - axis_index("vocab") * 3 - (1 if fault == "offset" else 0)
            own = (at >= 0) & (at < (2 if fault == "edge" else 3))
            of = jnp.where(own, jnp.take_along_axis(logits, jnp.clip(at, 0, 2)[:, None], 1)[:, 0], 0)  # or: label
            of = of if fault == "label" else psum(of, "vocab")
            sums = jnp.sum(jnp.where(counted, jnp.log(total) + top - of, 0)), jnp.sum(counted)
            return pmean(sums[0] / sums[1], "data") if fault == "means" else jnp.divide(*psum(sums, "data"))

        return jax.value_and_grad(lambda w: loss(x, w, labels))(w)

    return plain, sharded


@program("data=4", "8,5 4,3 12,8 12,3")
def fully_sharded(fault, mesh):
    def loss(w1, w2, x, y):
        return jnp.mean((jnp.tanh(x @ w1)[:, :4] @ w2 - y) ** 2)

    def plain(w1, w2, x, y):
        g1, g2 = jax.grad(loss, (0, 1))(w1, w2, x, y)
        return w1 - 0.1 * g1, w2 - 0.1 * g2

    @manual(mesh, (P("data"),) * 4, (P("data"), P("data")), check=True)
    def sharded(w1, w2, x, y):
        full = all_gather(w1, "data", tiled=True), all_gather(w2, "data", tiled=True)
        g1, g2 = jax.grad(loss, (0, 1))(*full, x, y)
        g1 = psum_scatter(g1, "data", tiled=True) / (16 if fault == "square" else 4)
        g2 = g2[:1] if fault == "slices" else psum_scatter(g2, "data", tiled=True)  # or: undivided
        g2 = g2 if fault == "undivided" else ppermute(g2, "data", ring(4)) / 4 if fault == "other" else g2 / 4
        return w1 - 0.1 * g1, w2 - 0.1 * g2

    return plain, sharded


@program("expert=4", "20,6 6,8 8,6,5 8,5,6")
def experts(fault, mesh):
    def route(x, router, limit=2, slots=1):
        gates = jax.nn.softmax(x @ router)
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 8, dtype=jnp.int32)
        slot = jnp.cumsum(chosen, 0) - slots  # or: slot
        kept = (chosen > 0) & (slot < limit)  # or: full
        return jnp.where(kept[..., None], jax.nn.one_hot(slot, 3), 0), jnp.max(gates, -1)

    def plain(x, router, w1, w2):
        def group(x):  # capacity is of the tokens of a device
            to, gate = route(x, router)
            inputs = jnp.einsum("tec,td->ecd", to, x)
            outputs = jnp.einsum("ecf,efd->ecd", jnp.tanh(jnp.einsum("ecd,edf->ecf", inputs, w1)), w2)
            return jnp.einsum("tec,ecd->td", to, outputs) * gate[:, None]

        return jax.vmap(group)(x.reshape(4, 5, 6)).reshape(20, 6)

    @manual(mesh, (P("expert"), P(), P("expert"), P("expert")), P("expert"))
    def sharded(x, router, w1, w2):
        to, gate = route(x, router, 1 if fault == "full" else 2, 0 if fault == "slot" else 1)
        inputs = jnp.einsum("tec,td->ecd", to, x)  # or: first
        inputs = inputs.reshape(2, 4, 3, 6).swapaxes(0, 1) if fault == "there" else inputs.reshape(4, 2, 3, 6)
        inputs = inputs if fault == "first" else all_to_all(inputs, "expert", 0, 0)
        inputs = inputs.swapaxes(0, 1).reshape(2, 12, 6)
        w2 = w2[::-1] if fault == "weights" else w2
        outputs = jnp.einsum("ecf,efd->ecd", jnp.tanh(jnp.einsum("ecd,edf->ecf", inputs, w1)), w2)
        outputs = outputs.reshape(2, 4, 3, 6).swapaxes(0, 1)  # or: left
        outputs = outputs if fault == "left" else all_to_all(outputs, "expert", 0, 0)
        outputs = (outputs.swapaxes(0, 1) if fault == "back" else outputs).reshape(8, 3, 6)
        return jnp.einsum("tec,ecd->td", to, outputs) * (1 if fault == "gate" else gate[:, None])

    return plain, sharded


@program("seq=4", "12,3 12,3 12,5")
def ring_attention(fault, mesh):
    def plain(q, k, v):
        scores = jnp.where(jnp.arange(12)[:, None] >= jnp.arange(12), q @ k.T * 3**-0.5, -jnp.inf)
        return jax.nn.softmax(scores) @ v

    @manual(mesh, (P("seq"),) * 3, P("seq"))
    def sharded(q, k, v):
        index, rows = axis_index("seq"), jnp.arange(3)

        def step(carry, t):
            k, v, top, total, out = carry
            source = (index + t) % 4 if fault == "source" else (index - t) % 4
            seen = (index * 3 + rows)[:, None] >= source * 3 + rows - (1 if fault == "edge" else 0)
            scores = jnp.where(seen, q @ k.T * 3**-0.5, -jnp.inf)
            larger = jnp.maximum(top, scores.max(1))
            kept, p = jnp.exp(top - larger), jnp.exp(scores - larger[:, None])
            total = total + p.sum(1) if fault == "total" else total * kept + p.sum(1)
            out = out + p @ v if fault == "rescale" else out * kept[:, None] + p @ v
            k = k if fault == "keys" else ppermute(k, "seq", ring(4, -1 if fault == "turn" else 1))
            return (k, ppermute(v, "seq", ring(4)), larger, total, out), None

        start = k, v, jnp.full(3, -jnp.inf), jnp.zeros(3), jnp.zeros((3, 5))
        (_, _, _, total, out), _ = lax.scan(step, start, jnp.arange(3 if fault == "steps" else 4))
        return out / total[:, None]

    return plain, sharded


@program("rows=4", "12,3 3,3,5")
def convolution(fault, mesh):
    def plain(x, kernel):
        padded = jnp.pad(x, ((1, 1), (0, 0)))
        return jnp.tanh(sum(padded[i : i + 12] @ kernel[i] for i in range(3)))

    @manual(mesh, (P("rows"), P()), P("rows"), check=True)
    def sharded(x, kernel):
        down, up = [(0, 1), (1, 2), (2, 3)], [(1, 0), (2, 1), (3, 2)]
        left = ppermute(x[:1] if fault == "near" else x[-1:], "rows", ring(4) if fault == "wraps" else down)
        right = ppermute(x[1:2] if fault == "far" else x[:1], "rows", down if fault == "turned" else up)
        padded = jnp.concatenate([left, x, right])
        return jnp.tanh(sum(padded[i : i + 3] @ kernel[2 - i if fault == "window" else i] for i in range(3)))

    return plain, sharded


@program("stage=4", "4,5,5 3,2,5")
def pipeline(fault, mesh):
    def plain(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    @manual(mesh, (P("stage"), P()), P())
    def sharded(w, x):
        stage = axis_index("stage")

        def tick(carry, t):
            taken = x[jnp.clip(t - 1 if fault == "take" else t, 0, 2)]
            given = jnp.where(stage == 0, taken, carry)
            out = jnp.tanh(given @ w[0])
            return ppermute(given if fault == "input" else out, "stage", ring(4, 3 if fault == "skip" else 1)), out

        _, outs = lax.scan(tick, jnp.zeros((2, 5)), jnp.arange(6))
        outs = outs[2:5] if fault == "ticks" else outs[3:]
        return psum(jnp.where(stage == (2 if fault == "last" else 3), outs, 0), "stage")

    return plain, sharded


@program("rows=4", "12,5 i12:2,7")
def embedding(fault, mesh):
    def plain(table, ids):
        return jax.value_and_grad(lambda table: jnp.sum(jnp.tanh(table[ids])))(table)

    @manual(mesh, (P("rows"), P()), (P(), P("rows")))
    def sharded(table, ids):
        at = ids - axis_index("rows") * (4 if fault == "offset" else 3)
        own = ((at >= 0) & (at < (2 if fault == "edge" else 3)))[..., None]

        def read(table):
            rows = table[jnp.clip(at, 0, 2)]
            return rows if fault == "unmasked" else jnp.where(own, rows, 0)

        rows, back = jax.vjp(read, table)
        rows = pmax(rows, "rows") if fault == "larger" else psum(rows, "rows")  # or: unmasked
        value, g = jax.value_and_grad(lambda rows: jnp.sum(jnp.tanh(rows)))(rows)
        return value, back(psum(g, "rows") if fault == "twice" else g)[0]

    return plain, sharded


@program("data=2 model=2", "8,6 6,4")
def dropout(fault, mesh):
    key = jax.random.key(7)

    def drop(x, key, keep=0.8):
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / keep, 0)  # or: keep same layer

    def plain(x, w):
        def part(i, x):
            own = jax.random.fold_in(key, i)
            return drop(jnp.tanh(drop(x, own) @ w), jax.random.fold_in(own, 1))

        return jnp.concatenate([part(i, x[4 * i : 4 * i + 4]) for i in range(2)])

    @manual(mesh, (P("data"), P("model")), P("data"))
    def sharded(x, w):
        own = key if fault == "same" else jax.random.fold_in(key, axis_index("model" if fault == "axis" else "data"))
        h = drop(x, jax.random.fold_in(own, axis_index("model")) if fault == "both" else own)
        h = lax.dynamic_slice_in_dim(h, axis_index("model") * 3, 3, 1)
        h = jnp.tanh(psum(h @ w, "model"))
        return drop(h, own if fault == "layer" else jax.random.fold_in(own, 1), 0.2 if fault == "keep" else 0.8)

    return plain, sharded


@program("data=4", "8,3 8,3 8,3 12,8 12,3")
def sharded_adam(fault, mesh):
    def step(w, g, m, v, old=False, count=3):
        new, v = 0.9 * m + 0.1 * g, 0.95 * v**2 + 0.05 * g * g
        change = (m if old else new) / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)  # or: moment count
        return w - 0.01 * change, new, v

    def plain(w, m, v, x, y):
        return step(w, jax.grad(squares)(w, x, y), m, v)

    @manual(mesh, (P(), P("data"), P("data"), P("data"), P("data")), (P(), P("data"), P("data")))
    def sharded(w, m, v, x, y):
        g = jax.grad(squares)(w, x, y)
        g = psum_scatter(g, "data", tiled=True) / (1 if fault == "sums" else 4)
        part = lax.dynamic_slice_in_dim(w, axis_index("data") * (1 if fault == "slice" else 2), 2)
        new, m, v = step(part, g, m, v, fault == "moment", 2 if fault == "count" else 3)
        return all_gather(part if fault == "old" else new, "data", tiled=True), m, v

    return plain, sharded


@program("data=4", "i6:13 i6:1")
def histogram(fault, mesh):
    def plain(ids, extra):
        return jnp.zeros(6, jnp.int32).at[ids].add(1).at[extra].add(1), jnp.cumsum(ids)

    def sharded(ids, extra):
        @manual(mesh, (P("data"), P()), (P(), P("data")))
        def count(ids, extra):
            places = axis_index("data") * 4 + jnp.arange(4)
            real = places <= 13 if fault == "tail" else places < 13
            at = ids + 1 if fault == "bins" else ids
            own = jnp.zeros(6, jnp.int32).at[at].add(real.astype(jnp.int32))  # or: local
            total = own if fault == "local" else (pmax if fault == "most" else psum)(own, "data")
            total = psum(total, "data") if fault == "twice" else total
            sums = all_gather(ids.sum(), "data")
            before = jnp.arange(4) <= axis_index("data") if fault == "prefix" else jnp.arange(4) < axis_index("data")
            return total.at[extra].add(1), jnp.cumsum(ids) + jnp.sum(jnp.where(before, sums, 0))

        counts, sums = count(jnp.pad(ids, (0, 3)), extra)
        return counts, sums[:13]

    return plain, sharded
