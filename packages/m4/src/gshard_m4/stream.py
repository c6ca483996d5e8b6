"""Searching without end: sentences join a search that is under way, and leave it one by one.

A batch is as slow as its slowest sentence, and who comes while it runs waits for its end. Here each of B places holds
a sentence that began when it came. The device runs a few steps at a time; in between, sentences that have ended are
handed out and others take their places. There is one such pool of places for each width that sources are padded to.
The next turn is that of the width whose sentences have waited most turns, all together: a turn takes as long for one
sentence as for many.

What becomes of a sentence depends on nothing but the sentence: every program has one shape, sources are encoded so many
at a time whether there are as many or not, rows do not see each other, and experts have no capacity limit
(`TransformerConfig.dropless`).

    search = Search(config, params, options, batch=16)
    search.add("a", Sentence((5, 9, 1), 16))
    while search.busy:
        for ticket, tokens_NT, score_N in search.step(): ...
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from gshard import moe
from gshard_m4.config import on_devices
from gshard_m4.decode import PAD, Beam, DecodeConfig, begin_beam, extend_beam, unfinished

_AT_ONCE = 4
"""Sources that are encoded together; on several devices a multiple of their number, at least as many."""


class Sentence(NamedTuple):
    """A source to be searched for.

    Attributes:
        ids: its tokens, end included.
        width: what they are padded to.
    """

    ids: tuple[int, ...]
    width: int


class Found(NamedTuple):
    """The translations of a sentence, N of them, best first.

    Attributes:
        ticket: what `Search.add` was given with the sentence.
        tokens_NT: ids without the end token, followed by zeros.
        score_N: the normalised log-probability that they are ordered by, minus infinity where there are fewer than N.
    """

    ticket: Any
    tokens_NT: np.ndarray
    score_N: np.ndarray


class Pool(NamedTuple):
    """The state of the search for sources of one width: B places."""

    memory: Any
    valid_BW: jax.Array
    beam: Beam


def placed(config: moe.TransformerConfig, params: Any, devices: int = 1) -> Any:
    """The parameters on the devices of a search: experts are dealt out, each device has everything else.

    Args:
        config: the model.
        params: its parameters.
        devices: how many; the first ones.
    """
    if devices == 1:
        return jax.device_put(params, jax.devices()[0])

    def put(spec: moe.Param, value: Any) -> jax.Array:
        dealt = spec.dims[:2] == ("layers", "experts") and spec.shape[1] % devices == 0
        where = PartitionSpec(None, "devices") if dealt else PartitionSpec()
        return jax.device_put(value, NamedSharding(_mesh(devices), where))

    return jax.tree.map(put, dict(moe.param_specs(config)), params)


def _mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("devices",))


@functools.lru_cache(maxsize=64)
def _programs(
    config: moe.TransformerConfig, options: DecodeConfig, batch: int, width: int, devices: int
) -> tuple[Callable[..., Pool], Callable[..., Pool], Callable[..., tuple[Pool, jax.Array]]]:
    """Makes an empty pool; admits some sources; goes on for some steps."""
    config = on_devices(config, devices).dropless()
    jit: Any = jax.jit if devices == 1 else functools.partial(gshard.jit, mesh=_mesh(devices))
    T = options.longest(width)

    def encoded(params: Any, source_RW: jax.Array) -> Any:
        return moe.project_memory(config, params, moe.encode(config, params, source_RW))

    def empty(params: Any) -> Pool:
        shapes = jax.eval_shape(encoded, params, jnp.zeros((batch, width), jnp.int32))
        memory = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes)
        beam = begin_beam(batch, T, options, moe.init_cache(config, batch, T * options.beam))
        valid_BW = jnp.broadcast_to(jnp.arange(width) == 0, (batch, width))  # something to attend to
        return Pool(memory, valid_BW, beam._replace(live_BK=jnp.full_like(beam.live_BK, -jnp.inf)))

    def admit(params: Any, pool: Pool, source_RW: jax.Array, place_R: jax.Array) -> Pool:
        """Place B, which there is not, is that of no source."""
        start = begin_beam(source_RW.shape[0], T, options)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[place_R].set(new, mode="drop")

        beam = jax.tree.map(put, pool.beam._replace(cache=None), start)
        memory = encoded(params, source_RW)
        return Pool(
            jax.tree.map(lambda old, new: old.at[:, place_R].set(new, mode="drop"), pool.memory, memory),
            put(pool.valid_BW, source_RW != PAD),
            beam._replace(cache=pool.beam.cache),  # what is in there is not seen
        )

    def advance(params: Any, pool: Pool, steps: jax.Array, until: jax.Array) -> tuple[Pool, jax.Array]:
        """At most so many steps, or until no more than so many sentences are unfinished."""

        def score(cache: Any, tokens_BK: jax.Array, position_B: jax.Array, seen_BKP: jax.Array) -> Any:
            memory, valid_BW = pool.memory, pool.valid_BW
            return moe.decode_flat_step(config, params, cache, tokens_BK, position_B, memory, valid_BW, seen_BKP)

        def goes_on(carry: tuple[jax.Array, Beam]) -> jax.Array:
            return (carry[0] < steps) & (jnp.sum(unfinished(carry[1], options)) > until)

        def once(carry: tuple[jax.Array, Beam]) -> tuple[jax.Array, Beam]:
            return carry[0] + 1, extend_beam(score, carry[1], options)

        _, beam = jax.lax.while_loop(goes_on, once, (jnp.int32(0), pool.beam))
        return pool._replace(beam=beam), unfinished(beam, options)

    return jax.jit(empty), jit(admit, donate_argnums=1), jit(advance, donate_argnums=1)


class _OfWidth:
    """The search for sources of one width."""

    def __init__(self, run: Search, width: int):
        self._run, self._width = run, width
        self._pool: Pool | None = None
        self._places: list[Any] = [None] * run.batch
        self._come: deque[tuple[Any, Sentence]] = deque()
        self.waited = 0  # turns that its sentences have waited since the last one, all together

    @property
    def free(self) -> int:
        return self._places.count(None) - len(self._come)

    @property
    def held(self) -> int:
        return len(self._places) - self.free

    def add(self, ticket: Hashable, sentence: Sentence) -> None:
        self._come.append(((ticket,), sentence))  # in a tuple, so that no ticket is taken for a free place

    def step(self, more: bool) -> list[Found]:
        run = self._run
        empty, admit, advance = _programs(run.config, run.options, run.batch, self._width, run.devices)
        if self._pool is None:
            # Placed as the pool that a search returns is: `admit` would be compiled once more for another placement.
            everywhere = jax.devices()[0] if run.devices == 1 else NamedSharding(_mesh(run.devices), PartitionSpec())
            self._pool = jax.device_put(empty(run.params), everywhere)
        while some := min(len(self._come), self._places.count(None), run.at_once):
            source_RW, place_R = self._seated([self._come.popleft() for _ in range(some)])
            self._pool = admit(run.params, self._pool, source_RW, place_R)
        held = [at for at, place in enumerate(self._places) if place is not None]
        until = max(len(held) - run.at_once, 0) if self.free < 0 or (more and not self.free) else 0
        self._pool, running_B = advance(run.params, self._pool, np.int32(run.steps), np.int32(until))
        running = np.asarray(running_B)
        ended = [at for at in held if not running[at]]
        if not ended:
            return []
        tokens_BNT, score_BN = jax.device_get((self._pool.beam.best_BNT, self._pool.beam.best_BN))
        found = [Found(self._places[at][0], tokens_BNT[at], score_BN[at]) for at in ended]
        for at in ended:
            self._places[at] = None
        return found

    def _seated(self, some: list[tuple[Any, Sentence]]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of sources, and the places that they have taken."""
        source_RW = np.full((self._run.at_once, self._width), PAD, np.int32)
        place_R = np.full(self._run.at_once, self._run.batch, np.int32)
        for row in range(self._run.at_once):
            ids = some[min(row, len(some) - 1)][1].ids  # one again where there are fewer, which is thrown away
            source_RW[row, : len(ids)] = ids
        for row, (ticket, _) in enumerate(some):
            place_R[row] = self._places.index(None)
            self._places[place_R[row]] = ticket
        return source_RW, place_R


class Search:
    """A search that goes on: see the module.

    Args:
        config: the model.
        params: its parameters, as `placed` puts them.
        options: how to search.
        batch: places B of each width.
        steps: after which a step of the search ends, to let others in.
        devices: more than one partitions the search over them, as the marks of the MoE layers ask.
    """

    def __init__(
        self, config: moe.TransformerConfig, params: Any, options: DecodeConfig, batch: int, steps: int = 8,
        devices: int = 1,
    ):  # fmt: skip
        self.config, self.params, self.options = config, params, options
        self.batch, self.steps, self.devices = batch, steps, devices
        self.at_once = -(-_AT_ONCE // devices) * devices
        self._widths: dict[int, _OfWidth] = {}

    @property
    def busy(self) -> bool:
        """Whether there are sentences in it."""
        return any(of.held for of in self._widths.values())

    def room(self, width: int) -> int:
        """How many more of this width would find a place now."""
        return max(self._widths[width].free, 0) if width in self._widths else self.batch

    def add(self, ticket: Hashable, sentence: Sentence) -> None:
        """Takes a sentence; one for which there is no room waits, and those of its width come in their order."""
        if sentence.width not in self._widths:
            self._widths[sentence.width] = _OfWidth(self, sentence.width)
        self._widths[sentence.width].add(ticket, sentence)

    def step(self, *, more: bool = False) -> list[Found]:
        """Goes on for a while with the width whose sentences have waited most turns, all together.

        Args:
            more: whether others wait elsewhere, so that it ends as soon as there is room.

        Returns:
            What has come to its end.
        """
        busy = [of for of in self._widths.values() if of.held]
        if not busy:
            return []
        for of in busy:
            of.waited += of.held
        chosen = max(busy, key=lambda of: of.waited)
        chosen.waited = 0
        return chosen.step(more)
