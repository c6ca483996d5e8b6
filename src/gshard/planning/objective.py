"""Prices plans: the cost of a plan is the sum of the costs of its equations and of its reshards.

Without a machine, the unit is bytes sent, and operations and messages count as bytes (``Bytes``). With a machine, the
unit is seconds (``lowering.seconds``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gshard.comm.reshard import Reshards
from gshard.comm.shards import sent_inside
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Equation, Value
from gshard.core.rule import COMMUNICATE, REPLICATE, Rule, Split
from gshard.core.sharding import Sharding
from gshard.device.fusion_model import Kernel, is_product, kind_of
from gshard.planning.strategies import WASTE, share
from gshard.solver.problem import Floats

# In bytes. An operation of a product counts as one byte, so that gshard computes no product twice to send less. To
# leave the rows of (m, k) @ (k, n) whole saves at most an all-reduce of the gradient of its weights, 8 k n bytes in
# float32, and costs up to 2 m k n more operations; m is at least the number of devices, and 4 rows are enough. An
# operation that a split saves beyond the share of the marks counts as it would on most machines.
PRODUCT, _SPARED = 1.0, 1e-3
# Other operations only break ties: the compiler fuses them into passes over memory. A split of an optimizer's update of
# whole gradients, for example, causes gathers of its results.
OTHER = 1e-4
# A byte that a loop stacks and holds until it ends. With this price, a loop scatters the gradients of large weights,
# which are sums, in its iterations instead of after its end: more messages, as many bytes, no stack of whole gradients.
_STACKED = 1 / 512
# A byte of an array beyond the bytes that a device has under the marks. A device writes and reads it at least once, and
# no machine's memory is more than 256 times as fast as its network.
_BEYOND = 1 / 128
BY_BYTES = "bytes sent"  # the unit without a machine, for messages


class StackCost(NamedTuple):
    """What the loop of a stack moves for one slice of it besides its kernels."""

    value: Value  # the slice, a value of the loop's body
    runs: int  # the number of iterations in a call
    byte_cost: float  # the cost of one byte of a device's part, in each iteration
    run_cost: float  # the cost of an iteration besides its bytes


class Objective(Reshards):
    """The costs of the choices of a plan."""

    tie: float  # breaks ties in favour of the propagated sharding
    held_byte_cost: float  # of a byte held during a call; breaks ties in favour of less memory
    stacked_byte_cost: float  # of a byte that a loop stacks and holds until it ends
    extra_byte_cost: float  # of a byte of an array beyond the bytes under the marks, each time the array is computed
    fuses: bool  # whether kernels may contain several equations
    counted: str  # the unit, for messages

    def assuming(self) -> Objective:
        """The same objective with lower bounds instead of costs that take long to compute, until ``price`` does."""
        return self

    def price(self, splits: Mapping[Equation, Split]) -> bool:
        """Computes the costs of equations with these splits. True if one had a lower bound before, so costs changed."""
        return False

    def kernels(self, block: Block) -> Iterator[tuple[Kernel, int]]:
        """The kernels of a program, each with its number of runs."""
        raise NotImplementedError

    def stack_costs(self, block: Block) -> Iterable[StackCost]:
        """The costs of the slices that loops copy out of their stacks, copy into them, or fill with zeros."""
        return ()

    def cost_key(self, kernel: Kernel) -> Hashable:
        """A key: kernels with equal keys have equal costs under equal splits."""
        raise NotImplementedError

    def split_costs(self, kernel: Kernel, splits: Sequence[Split], marked_share: float) -> Floats:
        """float64 [splits]: one run of a kernel under each split of its equation.

        ``marked_share`` is the largest share of its work that a device has under the marks; ``inf`` if unknown.
        """
        raise NotImplementedError

    def sharding_costs(self, kernel: Kernel, states: Sequence[Sharding]) -> Floats:
        """float64 [states]: one run of an elementwise kernel whose arrays all have the same sharding."""
        raise NotImplementedError


class Bytes(Objective):
    """Bytes that each device sends, with messages and operations counted as bytes."""

    held_byte_cost = 1e-9
    stacked_byte_cost = _STACKED
    extra_byte_cost = _BEYOND
    tie = 1e-3
    fuses = False
    counted = BY_BYTES

    def __init__(self, mesh: Mesh, axes: tuple[Atoms, ...]):
        super().__init__(dataclasses.replace(mesh, times=None), axes)

    def kernels(self, block: Block) -> Iterator[tuple[Kernel, int]]:
        """Each equation is one kernel: without a machine there is no model of fusion."""
        for e, times in block.runs():
            yield Kernel(e, kind_of(e), (), (), e.outputs), times

    def cost_key(self, kernel: Kernel) -> Hashable:
        return kernel.equation.rule, kernel.writes[0].shape if kernel.writes else ()

    def split_costs(self, kernel: Kernel, splits: Sequence[Split], marked_share: float) -> Floats:
        rule = kernel.equation.operator_rule
        work = np.array([rule.flops * share(rule, split, self.mesh) for split in splits])
        # If the user permits unreduced values to pass, the marks give every device the work on its own parts.
        parts = np.array([self.mesh.count(permitted_atoms(rule, split)) for split in splits]) if rule.finite else 1
        work_of_one, with_parts = work / parts, work - work / parts
        sent = [sent_inside(kernel.equation, split, self.mesh) for split in splits]
        # To repeat an expensive operation beyond the share of the marks, with padding, costs more than it can save by
        # sending less. To run it less often saves what it takes on most machines.
        limit = WASTE * rule.flops * marked_share if rule.flops else 0.0
        # It is expensive if it is a product, or mixes elements along a dimension: a sort, a transform; no slice.
        mixes = rule.index is None and any(f.kind in (COMMUNICATE, REPLICATE) for f in rule.factors)
        extra_price = PRODUCT if is_product(rule) or mixes else OTHER
        saved_price = _SPARED if is_product(rule) else OTHER
        worked = extra_price * np.maximum(work_of_one - limit, 0) + saved_price * (
            np.minimum(work_of_one, limit) + with_parts
        )
        return worked + np.array(sent)  # type: ignore[no-any-return]

    def sharding_costs(self, kernel: Kernel, states: Sequence[Sharding]) -> Floats:
        rule, (v,) = kernel.equation.operator_rule, kernel.writes
        parts = [math.prod(s.local_shape(self.mesh, v.shape)) / max(math.prod(v.shape), 1) for s in states]
        return rule.flops * OTHER * np.array(parts)


@tabulated(64)
def bytes_on(mesh: Mesh, axes: tuple[Atoms, ...]) -> Bytes:
    """The objective in bytes for a mesh. Plans that are made together share the costs of reshards."""
    return Bytes(mesh, axes)


def permitted_atoms(rule: Rule, split: Split) -> Atoms:
    """The atoms over which unreduced values pass an equation by permission of the user (``tracing.permitted``)."""
    permitted = [-1 - k for k, linear in enumerate(rule.linear) if linear in rule.finite]
    return tuple(a for key in permitted for a in split.get(key, ()))
