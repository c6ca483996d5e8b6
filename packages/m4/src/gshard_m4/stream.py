"""Searching without end: sentences join a search that is under way, and leave it one by one.

A batch is as slow as its slowest sentence, and who comes while it runs waits for its end. Here each of B places holds
a sentence that began when it came (`Beam.position` is one for each). The device runs a few steps at a time; in between,
sentences that have ended are handed out and others take their places. There is one such search for each width that
sources are padded to. The next turn is that of the width whose sentences have waited most turns, all together: a turn
takes as long for one sentence as for many.

What becomes of a sentence depends on nothing but the sentence: every program has one shape, sources are encoded so many
at a time whether there are as many or not, and rows do not see each other.

    search = Continuous(config, params, options, batch=16)
    search.add("a", Sentence((5, 9, 1), 16))
    while search.busy:
        for ticket, tokens_NT, score_N in search.step(): ...
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gshard import moe
from gshard_m4.config import on_devices
from gshard_m4.decode import PAD, Beam, DecodeConfig, begin_beam, extend_beam, make_decode, make_scorer, unfinished

_AT_ONCE = 4
"""Sources that are encoded together."""


class Sentence(NamedTuple):
    """A source to be searched for.

    Attributes:
        ids: its tokens, end included.
        width: what they are padded to.
    """

    ids: tuple[int, ...]
    width: int


class Found(NamedTuple):
    """The translations of a sentence: `Decoded` without the sentences' dimension."""

    ticket: Any
    tokens_NT: np.ndarray
    score_N: np.ndarray


class Search(Protocol):
    """Something that sentences are given to, and translations come out of."""

    @property
    def busy(self) -> bool:
        """Whether there are sentences in it."""

    def room(self, width: int) -> int:
        """How many more of this width it takes now."""

    def add(self, ticket: Hashable, sentence: Sentence) -> None:
        """Takes a sentence, for which there must be room."""

    def step(self, *, more: bool = False) -> list[Found]:
        """Goes on for a while: what has come to its end since; ``more`` says that others wait for room."""


class Pool(NamedTuple):
    """The state of a continuous search on its device: B places."""

    memory: Any
    valid_BW: jax.Array
    beam: Beam


@functools.lru_cache(maxsize=64)
def _programs(
    config: moe.TransformerConfig, options: DecodeConfig, batch: int, width: int
) -> tuple[Callable[..., Pool], Callable[..., Pool], Callable[..., tuple[Pool, jax.Array]]]:
    """Makes an empty pool; admits some sources; goes on for some steps."""
    config = on_devices(config, 1).dropless()
    T = options.longest(width)

    def empty(params: Any) -> Pool:
        source_BW = jnp.zeros((batch, width), jnp.int32)
        shapes = jax.eval_shape(lambda: moe.project_memory(config, params, moe.encode(config, params, source_BW)))
        memory = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes)
        cache = moe.init_cache(config, batch, T * options.beam)
        beam = begin_beam(cache, jnp.full(batch, T, jnp.int32), batch, T, options)
        valid_BW = jnp.broadcast_to(jnp.arange(width) == 0, (batch, width))  # something to attend to
        return Pool(memory, valid_BW, beam._replace(live_BK=jnp.full_like(beam.live_BK, -jnp.inf)))

    def admit(params: Any, pool: Pool, source_RW: jax.Array, place_R: jax.Array) -> Pool:
        """Place B, which there is not, is that of no source."""
        memory = moe.project_memory(config, params, moe.encode(config, params, source_RW))
        rows = source_RW.shape[0]
        start = begin_beam(None, jnp.zeros(rows, jnp.int32), rows, T, options)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[place_R].set(new, mode="drop")

        beam = jax.tree.map(put, pool.beam._replace(cache=None), start)
        return Pool(
            jax.tree.map(lambda old, new: old.at[:, place_R].set(new, mode="drop"), pool.memory, memory),
            put(pool.valid_BW, source_RW != PAD),
            beam._replace(cache=pool.beam.cache),  # what is in there is not seen
        )

    def advance(params: Any, pool: Pool, steps: jax.Array, until: jax.Array) -> tuple[Pool, jax.Array]:
        """At most so many steps, or until no more than so many sentences are unfinished."""
        score = make_scorer(config, params, pool.memory, pool.valid_BW)

        def goes_on(carry: tuple[jax.Array, Beam]) -> jax.Array:
            return (carry[0] < steps) & (jnp.sum(unfinished(carry[1], options)) > until)

        def once(carry: tuple[jax.Array, Beam]) -> tuple[jax.Array, Beam]:
            return carry[0] + 1, extend_beam(score, carry[1], options)

        _, beam = jax.lax.while_loop(goes_on, once, (jnp.int32(0), pool.beam))
        return pool._replace(beam=beam), unfinished(beam, options)

    return jax.jit(empty), jax.jit(admit, donate_argnums=1), jax.jit(advance, donate_argnums=1)


class _OfWidth:
    """The continuous search for sources of one width."""

    def __init__(self, run: Continuous, width: int):
        self._run, self._width = run, width
        self._empty, self._admit, self._advance = _programs(run.config, run.options, run.batch, width)
        self._places: list[Any] = [None] * run.batch
        self._come: deque[tuple[Any, Sentence]] = deque()
        self._pool: Pool | None = None
        self.waited = 0  # turns that its sentences have waited since the last one, all together

    @property
    def free(self) -> int:
        return self._places.count(None) - len(self._come)

    @property
    def held(self) -> int:
        return len(self._places) - self.free

    @property
    def busy(self) -> bool:
        return self.held > 0

    def add(self, ticket: Hashable, sentence: Sentence) -> None:
        self._come.append(((ticket,), sentence))  # in a tuple, so that no ticket is taken for a free place

    def step(self, more: bool) -> list[Found]:
        run = self._run
        if self._pool is None:
            # Placed as the pool that a search returns is: `admit` would be compiled once more for another placement.
            device = next(iter(jax.tree.leaves(run.params)[0].sharding.device_set))
            self._pool = jax.device_put(self._empty(run.params), device)
        while self._come:
            self._let_in([self._come.popleft() for _ in range(min(len(self._come), _AT_ONCE))])
        held = [at for at, place in enumerate(self._places) if place is not None]
        until = max(len(held) - _AT_ONCE, 0) if more and not self.free else 0
        self._pool, running_B = self._advance(run.params, self._pool, np.int32(run.steps), np.int32(until))
        running = np.asarray(running_B)
        ended = [at for at in held if not running[at]]
        if not ended:
            return []
        tokens_BNT, score_BN = jax.device_get((self._pool.beam.best_BNT, self._pool.beam.best_BN))
        found = [Found(self._places[at][0], tokens_BNT[at], score_BN[at]) for at in ended]
        for at in ended:
            self._places[at] = None
        return found

    def _let_in(self, some: list[tuple[Any, Sentence]]) -> None:
        source_RW = np.full((_AT_ONCE, self._width), PAD, np.int32)
        place_R = np.full(_AT_ONCE, self._run.batch, np.int32)
        for row in range(_AT_ONCE):
            ids = some[min(row, len(some) - 1)][1].ids  # one again where there are fewer, which is thrown away
            source_RW[row, : len(ids)] = ids
        for row, (ticket, _) in enumerate(some):
            place_R[row] = self._places.index(None)
            self._places[place_R[row]] = ticket
        self._pool = self._admit(self._run.params, self._pool, source_RW, place_R)


class Continuous:
    """A search that goes on: see the module.

    Args:
        config: the model.
        params: its parameters, on the device.
        options: how to search.
        batch: places B of each width.
        steps: after which a step of the search ends, to let others in.
    """

    def __init__(self, config: moe.TransformerConfig, params: Any, options: DecodeConfig, batch: int, steps: int = 8):
        self.config, self.params, self.options = config, params, options
        self.batch, self.steps = batch, steps
        self._widths: dict[int, _OfWidth] = {}

    @property
    def busy(self) -> bool:
        """Whether there are sentences in it."""
        return any(of.busy for of in self._widths.values())

    def room(self, width: int) -> int:
        """How many more of this width it takes now."""
        return self._widths[width].free if width in self._widths else self.batch

    def add(self, ticket: Hashable, sentence: Sentence) -> None:
        """Takes a sentence."""
        if sentence.width not in self._widths:
            self._widths[sentence.width] = _OfWidth(self, sentence.width)
        self._widths[sentence.width].add(ticket, sentence)

    def step(self, *, more: bool = False) -> list[Found]:
        """Some steps of the width whose sentences have waited most turns, all together."""
        busy = [of for of in self._widths.values() if of.busy]
        if not busy:
            return []
        for of in busy:
            of.waited += of.held
        chosen = max(busy, key=lambda of: of.waited)
        chosen.waited = 0
        return chosen.step(more)


class InBatches:
    """One batch after the other: for a search that is partitioned over several devices.

    Args:
        config, params, options, batch: see `Continuous`.
        devices: how many.
    """

    def __init__(self, config: moe.TransformerConfig, params: Any, options: DecodeConfig, batch: int, devices: int = 1):
        self._run = make_decode(config, options, devices)
        self._params, self._batch = params, batch
        self._come: dict[int, deque[tuple[Any, Sentence]]] = {}

    @property
    def busy(self) -> bool:
        """Whether there are sentences in it."""
        return any(self._come.values())

    def room(self, width: int) -> int:
        """How many more of this width it takes now."""
        return self._batch - len(self._come.get(width, ()))

    def add(self, ticket: Hashable, sentence: Sentence) -> None:
        """Takes a sentence."""
        self._come.setdefault(sentence.width, deque()).append((ticket, sentence))

    def step(self, *, more: bool = False) -> list[Found]:
        """The batch of the width with most sentences."""
        width = max(self._come, key=lambda width: len(self._come[width]), default=0)
        some = list(self._come.pop(width, ()))
        if not some:
            return []
        source_BW = np.full((self._batch, width), PAD, np.int32)
        for row in range(self._batch):
            ids = some[row if row < len(some) else 0][1].ids  # no longer on the way than a real one
            source_BW[row, : len(ids)] = ids
        found = jax.device_get(self._run(self._params, source_BW))
        return [Found(ticket, found.tokens_BNT[row], found.score_BN[row]) for row, (ticket, _) in enumerate(some)]
