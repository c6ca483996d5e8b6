"""Small programs of two arrays of one shape, for laws about calls: one of each kind that a call treats in its own way.

Each is exact: of whole numbers, in int32 or in float32, it gives the same bits in whatever order it adds. Marks are by
number, so that a program runs on every mesh of eight devices. Outside of gshard it is the program without partitions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import gshard
from gshard import replicate, shard, split
from invented import primitive_of

RING = np.array([0, 1, 2, 3, 7, 6, 5, 4])[:, None]  # device ids: rows go round in this order
TABLE = np.arange(-7, 42, dtype=np.int32).reshape(7, 7)
ROWS = np.array([2, 0, 5, 5, 1, 7, 3])
HELD = jax.device_put(np.arange(8, dtype=np.int32), jax.devices()[0])[5]  # a committed array


@dataclasses.dataclass(frozen=True)
class Small:
    """One program.

    Attributes:
        function: of two arrays, or of a dictionary of them.
        in_dictionary: whether it takes them in one.
        linear: whether gradients are whole numbers as well.
        mapped: whether ``jax.vmap`` can be around it.
    """

    function: Callable[..., Any]
    in_dictionary: bool = False
    linear: bool = True
    mapped: bool = True

    def arguments(self, x, y):
        """The arguments of a call."""
        return ({"left": x, "right": y},) if self.in_dictionary else (x, y)


def named(function):
    """The function with names of its arguments' dimensions, for layouts."""
    return functools.wraps(function)(lambda *arguments: function(*gshard.name(arguments, "_ batch")))


def unread(x, y):
    return x + 1


def identity(x, y):
    return y, x


def running(x, y):
    return jnp.cumsum(split(x, 0, 8), 0) + y


def product(x, y):
    return jnp.matmul(split(x, 0, 4), y.T)


def unmarked(x, y):
    return jnp.cumsum(x - y, 0), (x * 2 + y).sum(1)


def elementwise(x, y):
    return jnp.where(x > y, x - y, 3 * split(x, 1, 8))


def reductions(pair):
    x, y = split(pair["left"], 0, 8), pair["right"]
    return {"total": x.sum(), "largest": jnp.max(x, 1), "columns": split(y, 1, 2).sum(0), "pair": pair}


def loop(x, y):
    def body(carry, row):
        carry = carry + row
        return carry, carry - y[0]

    return lax.scan(body, split(y[1], 0, 8), x)


def looked_up(x, y):
    found = jnp.take(split(x, 0, 8), ROWS, axis=0, mode="clip")
    return found, y.at[ROWS[:5]].add(found[:5], mode="drop")


def reshaped(x, y):
    return split(x, 0, 8).reshape(-1), jnp.flip(y, 0).reshape(x.shape[::-1]).T


def captured(x, y):
    return x.at[:7, :7].add(TABLE.astype(x.dtype)), split(y, 0, 2) - HELD.astype(y.dtype)


def crossed(x, y):
    return split(split(x, 0, 8) + 1, 1, 8) + y


def whole(x, y):
    return replicate(x) - split(y, 0, 2)


def ring(x, y):
    return shard(x, RING) + 1, y * 2


def ring_product(x, y):
    return jnp.matmul(shard(x, RING), y.T), x


def centred(x, y):
    return centre_p.bind(split(x, 0, 8)), y


centre_p = primitive_of("centre_of_histories", lambda x: x - x.sum(0, keepdims=True))
RULES = ("a b -> a b; replicate a", "a b -> a b; replicate a b")  # right, both; the second splits nothing


def register(which):
    """Registers one of the right rules of the primitive in ``centred``."""
    gshard.rule("centre_of_histories")(RULES[which])


PROGRAMS = {
    "unread": Small(unread),
    "identity": Small(identity),
    "running": Small(running),
    "product": Small(product, linear=False),
    "unmarked": Small(unmarked),
    "elementwise": Small(elementwise),
    "reductions": Small(reductions, in_dictionary=True, linear=False),
    "loop": Small(loop),
    "looked up": Small(looked_up),
    "reshaped": Small(reshaped),
    "captured": Small(captured),
    "crossed": Small(crossed),
    "whole": Small(whole),
    "ring": Small(ring, mapped=False),
    "ring product": Small(ring_product, linear=False, mapped=False),
    "centred": Small(centred, linear=False, mapped=False),
}  # fmt: skip


def numbers(shape, seed, dtype=np.int32):
    """Whole numbers of both signs."""
    return np.random.default_rng([seed, *shape]).integers(-9, 10, shape).astype(dtype)
