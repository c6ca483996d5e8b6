"""Loops over stacks, and the slices that a compiled program copies in them. Tests and benchmarks share them."""

import re

import jax
import jax.numpy as jnp

from gshard.xla.hlo_parser import read_module, type_bytes

LARGE = 4096  # bytes: smaller arrays are counters
_MOVING = frozenset(
    "parameter constant bitcast reshape copy transpose dynamic-slice dynamic-update-slice fusion".split()
)


def layers(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def kept_products(x, ws):
    def layer(x, w):
        y = x @ w
        return jnp.tanh(y), y

    return jax.lax.scan(layer, x, ws)


def elementwise(x, ws):
    return jax.lax.scan(lambda x, w: (x + w, jnp.sin(w)), x, ws)


def kept_carry(x, ws):
    return jax.lax.scan(lambda x, w: (x + w, x), x, ws)


def gradient(x, ws):
    return jax.grad(lambda ws: (layers(x, ws) ** 2).sum())(ws)


def both_ways(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.einsum("bj,ij->bi", jnp.tanh(x @ w), w), None), x, ws)[0]


def backwards(x, ws):
    return jax.lax.scan(lambda x, w: (x + w, jnp.sin(w)), x, ws, reverse=True)


def nested(x, ws):
    grouped = ws.reshape(2, 2, *ws.shape[1:])
    return jax.lax.scan(lambda x, w: (layers(x, w), None), x, grouped)[0]


LOOPS = layers, kept_products, elementwise, kept_carry, gradient, both_ways, backwards, nested


def copies_and_fills(text):
    """The number of slices that loops copy in an iteration, and of stacks that are filled with zeros.

    Args:
        text: ``compiled.as_text()`` of one of the loops above, with arrays of at least ``LARGE`` bytes.
    """
    module = read_module(text)
    bodies = [c for name, c in module.computations.items() if name in _bodies(module)]
    copied = sum(_copies_a_slice(module, made) for body in bodies for made in body.instructions.values())
    fused = {name for c in module.computations.values() for i in c.instructions.values() if i.opcode == "fusion"
             for name in i.called("calls")}  # fmt: skip
    programs = [c for name, c in module.computations.items() if name not in fused]
    return copied, sum(_filled(made) for c in programs for made in c.instructions.values())


def _bodies(module):
    made = (i for c in module.computations.values() for i in c.instructions.values())
    return {name for i in made if i.opcode == "while" for name in i.called("body")}


def _copies_a_slice(module, made):
    """Whether a kernel only copies a large array out of a stack or into one."""
    if made.opcode not in ("fusion", "fusion-start"):
        return False
    inner = list(_inside(module, module.computations[made.called("calls")[0]]))
    moved = [(body, i) for body, i in inner if i.opcode in ("dynamic-slice", "dynamic-update-slice")]
    if len(moved) != 1 or any(i.opcode not in _MOVING and type_bytes(i.type) >= LARGE for _, i in inner):
        return False
    body, slicing = moved[0]
    slice_type = slicing.type if slicing.opcode == "dynamic-slice" else body.instructions[slicing.operands[1]].type
    return type_bytes(slice_type) >= LARGE


def _inside(module, computation):
    """The instructions of a computation, those of its fusions included."""
    for made in computation.instructions.values():
        yield computation, made
        if made.opcode == "fusion":
            yield from _inside(module, module.computations[made.called("calls")[0]])


def _filled(made):
    """The number of stacks into which an instruction writes zeros, or copies of such stacks."""
    name = made.operands[0] if made.opcode == "copy" and made.operands else made.name
    if "broadcast" not in name or made.opcode not in ("fusion", "broadcast", "copy"):
        return 0
    stacks = re.findall(r"\w+\[4,\d[\d,]*\]", made.type)
    return sum(type_bytes(stack) >= LARGE for stack in stacks)
