"""Recomputes values of straight-line code instead of keeping them over the memory peak.

    y = f(x); ...; peak; ...; g(y)   ->   y = f(x); ...; peak; ...; x' = barrier(x, late); y' = f(x'); g(y')

The barrier hides from XLA that both computations are equal, and delays the second one until ``late`` is computed, an
operand of the reader that is computed after the peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gshard.core.jax_adapter import optimization_barrier_p
from gshard.core.program import Block, Constant, Equation, Value
from gshard.device.fusion_model import PASSING, kind_of, size
from gshard.language.registry import Call, rule_of
from gshard.remat.liveness import Liveness, Seconds
from gshard.rewrite.cse import is_pure
from gshard.rewrite.equation_graph import operands_first


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A buffer that is alive at the peak and read only later, with the saving and the price of recomputing it."""

    value: Value  # the buffer
    freed: int  # bytes saved at the peak
    seconds: float  # of its recomputation
    anchors: frozenset[Value]  # the buffers from which it is recomputed


def kept_over(liveness: Liveness, peak: int, seconds: Seconds, elsewhere: frozenset[Value]) -> list[Kept]:
    """The buffers that can be recomputed after a kernel instead of being kept."""
    found = []
    for v, made_at in liveness.made.items():
        later_users = [i for i in liveness.users.get(v, ()) if i > peak]
        if (
            made_at >= peak
            or not later_users
            or peak in liveness.users[v]
            or v in liveness.ends
            or v in elsewhere
            or not size(v)
        ):
            continue
        kernels = liveness.recomputation(v, later_users[0], peak)
        if kernels is None:
            continue
        anchors = {u for kernel in kernels for u in kernel.reads} - {w for kernel in kernels for w in kernel.writes}
        found.append(Kept(v, size(v), sum(map(seconds, kernels)), frozenset(anchors)))
    return found


def without_keeping(liveness: Liveness, peak: int, dropped: Sequence[Value], names: Iterator[int]) -> Block:
    """The block in which readers after the peak read recomputed values."""
    return _Recomputing(liveness, peak, frozenset(dropped), names).block()


class _Recomputing:
    def __init__(self, liveness: Liveness, peak: int, dropped: frozenset[Value], names: Iterator[int]):
        self.liveness, self.peak, self.dropped, self.names = liveness, peak, dropped, names
        self.recomputed: dict[Value, Value] = {}  # for each dropped value, its recomputation
        self.at = 0

    def block(self) -> Block:
        liveness, block = self.liveness, self.liveness.kernels.block
        equations: list[Equation] = []
        for e in block.equations:
            at = liveness.position.get(e)
            if at is None or at <= self.peak:
                equations.append(e)
                continue
            self.at = at
            self.fresh: list[Equation] = []
            self.hidden: dict[Value, Value] = {}
            self.here: dict[tuple[Value, bool], Value] = {}
            for x in operands_first(e.inputs, self._read_for):
                self._read(x)  # finds what it reads among the values before
            inputs = tuple(map(self._read, e.inputs))
            if self.hidden:
                late = self._late()
                if late is not None:
                    self._hide(late)
                    inputs = tuple(self.hidden.get(x, x) if x is late else x for x in inputs)  # type: ignore[arg-type]
                equations.append(self._barrier(e))
            equations += self.fresh
            changed = any(a is not b for a, b in zip(inputs, e.inputs, strict=True))
            equations.append(dataclasses.replace(e, inputs=inputs) if changed else e)
        return without_dead_code(Block(block.inputs, tuple(equations), block.outputs))

    def _read_for(self, x: Value | Constant) -> Sequence[Value | Constant]:
        """The values that ``_read`` reads for a value."""
        if isinstance(x, Constant) or self.liveness.is_buffer(x) or (x, False) in self.here:
            return ()
        return _passed(self.liveness.producer[x], x)

    def _sources_of(self, x: Value | Constant) -> Sequence[Value | Constant]:
        """The values that ``_source`` reads for a value."""
        liveness = self.liveness
        if isinstance(x, Constant) or (x, True) in self.here or x in self.recomputed:
            return ()
        if liveness.is_buffer(x) and x not in self.dropped and liveness.available(x, self.at, self.peak):
            return ()
        return _passed(liveness.producer[x], x)

    def _read(self, x: Value | Constant) -> Value | Constant:
        """The value that a reader after the peak reads instead of ``x``."""
        liveness = self.liveness
        if isinstance(x, Constant) or (x in self.dropped and x not in liveness.made):
            return x
        if liveness.is_buffer(x):
            return self._recompute(x) if x in self.dropped else x
        if (x, False) in self.here:
            return self.here[x, False]
        e = liveness.producer[x]
        operands = _passed(e, x)
        inputs = tuple(map(self._read, operands))
        if all(a is b for a, b in zip(inputs, operands, strict=True)):
            self.here[x, False] = x
        elif kind_of(e) == PASSING:
            (self.here[x, False],) = inputs  # type: ignore[assignment]
        else:
            self._clone(e, inputs, x, False)
        return self.here[x, False]

    def _source(self, x: Value | Constant) -> Value | Constant:
        """The value that a recomputation reads instead of ``x``."""
        liveness = self.liveness
        if isinstance(x, Constant):
            return x
        if liveness.is_buffer(x):
            if x in self.dropped:
                before = x in self.recomputed
                found = self._recompute(x)
                return self._hide(found) if before and (x, True) not in self.here else found
            if liveness.available(x, self.at, self.peak):
                return self._hide(x)
        if (x, True) in self.here:
            return self.here[x, True]
        e = liveness.producer[x]
        inputs = tuple(map(self._source, _passed(e, x)))
        if kind_of(e) != PASSING:
            return self._clone(e, inputs, x, True)
        (self.here[x, True],) = inputs  # type: ignore[assignment]
        return self.here[x, True]

    def _recompute(self, x: Value) -> Value:
        if x not in self.recomputed:
            e = self.liveness.producer[x]
            for y in operands_first(e.inputs, self._sources_of):
                self._source(y)
            self.recomputed[x] = self._clone(e, tuple(map(self._source, e.inputs)), x, True)
        return self.recomputed[x]

    def _clone(self, e: Equation, inputs: tuple[Value | Constant, ...], x: Value, is_source: bool) -> Value:
        outputs = tuple(Value(v.shape, v.dtype, next(self.names)) for v in e.outputs)
        self.fresh.append(dataclasses.replace(e, inputs=inputs, outputs=outputs))
        self.here.update({(v, is_source): w for v, w in zip(e.outputs, outputs, strict=True)})
        return self.here[x, is_source]

    def _hide(self, x: Value) -> Value:
        if x not in self.hidden:
            self.hidden[x] = Value(x.shape, x.dtype, next(self.names))
        return self.hidden[x]

    def _late(self) -> Value | None:
        """The last operand of the reader that is computed after the peak; None if there is none."""
        liveness = self.liveness
        kernel = liveness.kernels.kernels[self.at]
        late = [v for v in kernel.equation.inputs if isinstance(v, Value) and liveness.made.get(v, -1) > self.peak]
        late = late or [v for v in kernel.reads if liveness.made.get(v, -1) > self.peak]
        late = late or [v for k in liveness.kernels.kernels[self.peak + 1 : self.at] for v in k.writes]
        return max((v for v in late if v not in self.dropped), key=lambda v: liveness.made[v], default=None)

    def _barrier(self, user: Equation) -> Equation:
        given, outputs = tuple(self.hidden), tuple(self.hidden.values())
        shapes, dtypes = tuple(v.shape for v in given), tuple(v.dtype for v in given)
        call = Call(optimization_barrier_p.name, {}, shapes, shapes, dtypes, optimization_barrier_p)
        return Equation(
            optimization_barrier_p, {}, given, outputs, rule_of(call, None), user.source_info, file=user.file
        )


def _passed(e: Equation, x: Value) -> Sequence[Value | Constant]:
    """The operands from which an equation computes a result: of an equation that passes its operands on, one."""
    return (e.inputs[e.outputs.index(x)],) if kind_of(e) == PASSING else e.inputs


def without_dead_code(block: Block) -> Block:
    """The block without equations that have no readers and no effects."""
    needed = {v for v in block.outputs if isinstance(v, Value)}
    kept = []
    for e in reversed(block.equations):
        if needed.isdisjoint(e.outputs) and is_pure(e):
            continue
        kept.append(e)
        needed.update(v for v in e.inputs if isinstance(v, Value))
    return Block(block.inputs, tuple(reversed(kept)), block.outputs)
