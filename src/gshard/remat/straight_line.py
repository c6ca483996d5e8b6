"""Recomputes values of straight-line code instead of keeping them, and when buffers are written and read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence

from gshard.core.jax_adapter import optimization_barrier_p
from gshard.core.program import Block, Constant, Equation, Value
from gshard.device.fusion_model import PASSING, REGION, Buffers, Kernel, Kernels, kind_of
from gshard.language.registry import Call, rule_of
from gshard.rewrite.equation_graph import is_pure, operands_first, without_dead_code

# Computes when the buffers of a block are written and read, and which kernels recompute them.

# Seconds of one run of a kernel, including bodies and iterations of loops.
Seconds = Callable[[Kernel], float]


class Liveness(Buffers):
    """The buffers of one block, and the kernels that can recompute them."""

    def __init__(self, program: Kernels):
        super().__init__(program)
        # for each value, the equation that computes it; for the last equation of each kernel, the kernel's position
        self.producer = {v: e for e in program.block.equations for v in e.outputs}
        self.position = {kernel.equation: i for i, kernel in enumerate(program.kernels)}

    def sliced(self, v: Value) -> Value:
        """The buffer with the same slices as a value: its home, unless that has another shape."""
        home = self.buffer(v)
        return home if home.shape == v.shape else v

    def is_buffer(self, v: Value) -> bool:
        """Whether a value is a buffer: an input of the block, or written by a kernel."""
        return v not in self.producer or v in self.made

    def available(self, v: Value, at: int, peak: int) -> bool:
        """Whether a kernel can read a buffer: it is alive there, or alive at the peak and can be kept until then."""
        return v not in self.made or self.last[v] >= at or self.last[v] > peak

    def recomputation(self, v: Value, at: int, peak: int) -> list[Kernel] | None:
        """The kernels that recompute a buffer for a later kernel; None if that is impossible or too long."""
        kernels_needed: dict[Kernel, None] = {}
        pending = [v]
        while pending:
            kernel = self.kernels[self.made[pending.pop()]]
            if kernel in kernels_needed:
                continue
            if kernel.kind == REGION or not all(map(is_pure, (kernel.equation, *kernel.fused))):
                return None
            kernels_needed[kernel] = None
            if len(kernels_needed) > 64:
                return None
            pending += [u for u in kernel.reads if u is v or not self.available(u, at, peak)]
        return list(kernels_needed)


@dataclasses.dataclass(frozen=True, eq=False)
class Offer:
    """Values that need not be kept over a kernel, with the saving and the price."""

    values: tuple[Value, ...]  # the values
    freed: int  # bytes saved, minus those of values that must be kept instead
    seconds: float  # of computing them again
    # the block without the values of such offers, which have an equal ``rewrite``; the second argument gives indices of
    # new values
    without: Callable[[Sequence[Value], Iterator[int]], Block]
    rewrite: Hashable  # offers that have the same may be taken together
    anchors: frozenset[Value] = frozenset()  # the buffers from which the values are recomputed in straight-line code


def kept_over(liveness: Liveness, peak: int, seconds: Seconds, elsewhere: frozenset[Value]) -> list[Offer]:
    """The buffers that can be recomputed after a kernel instead of being kept."""
    found = []
    without = functools.partial(without_keeping, liveness, peak)
    for v, made_at in liveness.made.items():
        later_users = [i for i in liveness.users.get(v, ()) if i > peak]
        if (
            made_at >= peak
            or not later_users
            or peak in liveness.users[v]
            or v in liveness.kept
            or v in elsewhere
            or not v.bytes
        ):
            continue
        kernels = liveness.recomputation(v, later_users[0], peak)
        if kernels is None:
            continue
        anchors = {u for kernel in kernels for u in kernel.reads} - {w for kernel in kernels for w in kernel.writes}
        found.append(Offer((v,), v.bytes, sum(map(seconds, kernels)), without, peak, frozenset(anchors)))
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
        liveness, block = self.liveness, self.liveness.block
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
            inputs = self._read_all(e, False)
            if self.hidden:
                late = self._late()
                if late is not None:
                    self._hide(late)
                    inputs = tuple(self.hidden.get(x, x) if x is late else x for x in inputs)  # type: ignore[arg-type]
                equations.append(self._barrier(e))
            equations += self.fresh
            changed = any(a is not b for a, b in zip(inputs, e.inputs, strict=True))
            equations.append(dataclasses.replace(e, inputs=inputs) if changed else e)
        return Block(block.inputs, tuple(without_dead_code(equations, block.outputs)), block.outputs)

    def _needed(self, x: Value | Constant, is_source: bool) -> Sequence[Value | Constant]:
        """The values that ``_read`` reads for a value."""
        liveness = self.liveness
        if isinstance(x, Constant) or (x, is_source) in self.here or (is_source and x in self.recomputed):
            return ()
        if liveness.is_buffer(x) and not (is_source and self._is_gone(x)):
            return ()
        return _passed(liveness.producer[x], x)

    def _is_gone(self, x: Value) -> bool:
        """Whether a recomputation cannot read a buffer."""
        return x in self.dropped or not self.liveness.available(x, self.at, self.peak)

    def _read(self, x: Value | Constant, is_source: bool) -> Value | Constant:
        """The value that a reader after the peak reads instead of ``x``, or a recomputation (``is_source``)."""
        liveness = self.liveness
        if isinstance(x, Constant) or (not is_source and x in self.dropped and x not in liveness.made):
            return x
        if liveness.is_buffer(x):
            if x in self.dropped:
                before = x in self.recomputed
                found = self._recompute(x)
                return self._hide(found) if is_source and before and (x, True) not in self.here else found
            if not is_source:
                return x
            if not self._is_gone(x):
                return self._hide(x)
        if (x, is_source) in self.here:
            return self.here[x, is_source]
        e = liveness.producer[x]
        operands = _passed(e, x)
        inputs = tuple(self._read(y, is_source) for y in operands)
        if not is_source and all(a is b for a, b in zip(inputs, operands, strict=True)):
            self.here[x, False] = x
        elif kind_of(e) == PASSING:
            (self.here[x, is_source],) = inputs  # type: ignore[assignment]
        else:
            self._clone(e, inputs, x, is_source)
        return self.here[x, is_source]

    def _read_all(self, e: Equation, is_source: bool) -> tuple[Value | Constant, ...]:
        """What an equation reads instead of its operands."""
        for x in operands_first(e.inputs, lambda x: self._needed(x, is_source)):
            self._read(x, is_source)  # finds what it reads among the values before: no deep recursion
        return tuple(self._read(x, is_source) for x in e.inputs)

    def _recompute(self, x: Value) -> Value:
        if x not in self.recomputed:
            e = self.liveness.producer[x]
            self.recomputed[x] = self._clone(e, self._read_all(e, True), x, True)
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
        kernel = liveness.kernels[self.at]
        late = [v for v in kernel.equation.inputs if isinstance(v, Value) and liveness.made.get(v, -1) > self.peak]
        late = late or [v for v in kernel.reads if liveness.made.get(v, -1) > self.peak]
        late = late or [v for k in liveness.kernels[self.peak + 1 : self.at] for v in k.writes]
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
