"""Objective: the cost of a plan, which is the sum of the costs of its equations and of its moves.

Without a machine the cost is bytes sent; operations and messages count as bytes (``Bytes``). With a machine it is
seconds (``search.seconds``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from gshard.comm.reshard import MESSAGE
from gshard.comm.runs import laid_out
from gshard.comm.steps import LOCAL, Step, bytes_sent, rounds
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Equation
from gshard.core.rule import COMMUNICATE, REPLICATE, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split
from gshard.device.fusion_model import Kernel, is_product, kind_of
from gshard.planning.reshard_costs import Moves, has_many
from gshard.planning.strategies import share
from gshard.solver.problem import Floats

# In bytes. An operation of a product counts as one, so that no product is computed twice to send less: not to split
# the rows of (m, k) @ (k, n) spares at most an all-reduce of the gradient of its weights, 8 k n bytes in float32, and
# does up to 2 m k n operations more; m is at least the number of devices, and 4 rows are enough. One that a split
# spares beyond what the marks ask for counts as what it takes on most machines.
PRODUCT, _SPARED = 1.0, 1e-3
# Other operations decide between equals only: the compiler fuses them into passes over memory, and to split an
# optimizer's update of whole gradients, say, brings gathers of its results.
OTHER = 1e-4
# A byte that a loop stacks, and holds until it has ended. So the gradients of large weights, which are sums, are
# scattered in the rounds of a loop, not all of them after it: more messages, as many bytes, no stack of whole ones.
_STACKED = 1 / 512
# A byte of an array beyond the bytes that a device has of it as the marks say. It is written and read at least once,
# and no machine's memory is more than 256 times as fast as its network.
_BEYOND = 1 / 128
# A byte that is copied into place, where what is gathered or cut is more than one run of bytes.
_COPIED = 1 / 1024
BY_BYTES = "bytes sent"  # what is counted without a machine, for messages
# A step in which nothing is sent: of equal ways the one with fewer.
_SILENT = 1e-2


class Windows(NamedTuple):
    """Windows that an equation fetches of one operand as it reads it, those of windows included.

    Attributes:
        operand: which.
        which: equal ones of one array are fetched once in a block.
        cost: of fetching them.
    """

    operand: int
    which: tuple[Hashable, ...]
    cost: float


class Objective(Protocol):
    """What the choices of a plan cost."""

    mesh: Mesh
    axes: tuple[Atoms, ...]
    tie: float  # what decides between equals only: the one that follows the marks
    a_byte: float  # held for a call: among equals the one that takes less memory
    a_byte_stacked: float  # by a loop, until it has ended
    a_byte_beyond: float  # of an array that is larger on a device than the marks say, each time it is made
    fuses: bool  # whether ``kernels`` are of several equations
    counted: str  # what it counts, for messages

    def assuming(self) -> Objective:
        """The same objective with a lower bound for each cost that takes long to find, until ``price`` finds it."""
        ...

    def price(self, splits: Mapping[Equation, Split]) -> bool:
        """Prices equations that are split so. True if something had been assumed of one: other costs hold now."""
        ...

    def visit(self, shardings: Iterable[Sharding]) -> None:
        """Moves lead over these, where there are many axes."""
        ...

    def table(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding], shape: tuple[int, ...], itemsize: int
    ) -> Floats:
        """float64 [sources, targets]: moves of an array."""
        ...

    def kernels(self, block: Block) -> Iterator[tuple[Kernel, int]]:
        """What a program runs, and how often."""
        ...

    def alike(self, kernel: Kernel) -> Hashable:
        """A key: kernels with equal keys have equal costs, where they are split alike."""
        ...

    def of_splits(self, kernel: Kernel, ways: Sequence[Split], asked: float) -> Floats:
        """float64 [ways]: one run of a kernel, its equation split so.

        ``asked`` is the largest share of its work that a device has under the marks; ``inf`` where that is unknown.
        """
        ...

    def windows(self, e: Equation, ways: Sequence[Split]) -> Iterable[tuple[int, Windows]]:
        """What ``of_splits`` counts for an equation that others may share, each with the way in which it is fetched."""
        ...

    def of_shardings(self, kernel: Kernel, states: Sequence[Sharding]) -> Floats:
        """float64 [states]: one run of an elementwise kernel, all of whose arrays are sharded so."""
        ...


class Bytes(Moves):
    """Bytes that each device sends, with messages and operations counted as bytes."""

    a_byte, a_byte_stacked, a_byte_beyond, tie, fuses = 1e-9, _STACKED, _BEYOND, 1e-3, False
    counted = BY_BYTES

    def assuming(self) -> Bytes:
        return self

    def price(self, splits: Mapping[Equation, Split]) -> bool:
        return False

    def step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        if step.kind in LOCAL:
            return _SILENT
        copied = sum(laid_out(step, shape, mesh)) * itemsize
        return bytes_sent(step, shape, itemsize, mesh) + MESSAGE * rounds(step, mesh) + _COPIED * copied

    def price_class(self, step: Step) -> Hashable:
        if step.kind in LOCAL:
            return ()
        return step.kind, self._coarse.count(step.atoms), step.monoid, rounds(step, self._coarse)

    def kernels(self, block: Block) -> Iterator[tuple[Kernel, int]]:
        """Each equation by itself: without a machine there is no model of fusion."""
        for e, times in block.runs():
            yield Kernel(e, kind_of(e), (), (), e.outputs), times

    def alike(self, kernel: Kernel) -> Hashable:
        return kernel.equation.rule, kernel.writes[0].shape if kernel.writes else ()

    def of_splits(self, kernel: Kernel, ways: Sequence[Split], asked: float) -> Floats:
        rule = kernel.equation.rule
        assert rule is not None
        done = np.array([rule.flops * share(rule, split, self.mesh) for split in ways])
        # Where the user permits parts to pass, that all devices compute with theirs is what is asked for.
        parts = np.array([self.mesh.count(permitted_atoms(rule, split)) for split in ways]) if rule.finite else 1
        alone, with_parts = done / parts, done - done / parts
        sent = [rule.sends(self.mesh, split) if rule.sends is not None else 0 for split in ways]
        # Nothing that takes long is computed more often than the marks say, to send less. That it is computed less
        # often than they say is worth what it is worth on most machines.
        limit = rule.flops * asked if rule.flops else 0.0
        price = PRODUCT if _takes_long(rule) else OTHER
        spared = _SPARED if is_product(rule) else OTHER
        worked = price * np.maximum(alone - limit, 0) + spared * (np.minimum(alone, limit) + with_parts)
        return worked + np.array(sent)  # type: ignore[no-any-return]

    def windows(self, e: Equation, ways: Sequence[Split]) -> Iterable[tuple[int, Windows]]:
        return ()

    def of_shardings(self, kernel: Kernel, states: Sequence[Sharding]) -> Floats:
        rule, (v,) = kernel.equation.rule, kernel.writes
        assert rule is not None
        parts = [math.prod(s.local_shape(self.mesh, v.shape)) / max(math.prod(v.shape), 1) for s in states]
        return rule.flops * OTHER * np.array(parts)


def bytes_on(mesh: Mesh, axes: tuple[Atoms, ...]) -> Bytes:
    """The objective for a mesh.

    Plans that are made together share what moves cost. Its mesh may be another one that is equal: meshes are, whatever
    they were read from. Where there are many axes, each plan has its own, since moves lead over its own shardings only.
    """
    return Bytes(mesh, axes) if has_many(mesh, axes) else _shared_bytes(mesh, axes)


@tabulated(64)
def _shared_bytes(mesh: Mesh, axes: tuple[Atoms, ...]) -> Bytes:
    return Bytes(mesh, axes)


def permitted_atoms(rule: Rule, split: Split) -> Atoms:
    """The atoms over which parts pass an equation because the user permits it (``tracing.permitted``)."""
    ways = enumerate(rule.linear)
    return tuple(a for k, way in ways if way in rule.finite for a in split.get(-1 - k, ()))


def _takes_long(rule: Rule) -> bool:
    """Whether an equation is a product, or mixes elements along a dimension: a sort, a transform."""
    return is_product(rule) or any(f.kind in (COMMUNICATE, REPLICATE) for f in rule.factors)
