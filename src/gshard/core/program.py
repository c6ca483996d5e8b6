"""Program: the user's function as equations over values.

A program is a jaxpr made convenient: calls are inlined, every value is an object of its own (also in bodies of
loops), each equation has its rule or its region and knows the user's source line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from gshard.core.context import NO_CONTEXT, Context
from gshard.core.dropped import Dropped
from gshard.core.fired import Fired
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import Cache
from gshard.core.layout import Layout, Named
from gshard.core.look import Look
from gshard.core.mark import Mark
from gshard.core.memory_kinds import kind_in_space
from gshard.core.planning_tables import tabulated
from gshard.core.rule import Dims, Factor, Rule

_DECOMPOSED = 8  # of the ways in which a program's values are split, the latest ones


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One array of a program: an argument or the result of an equation. Compared by identity.

    Attributes:
        weak: whether its dtype gives way to that of others, as that of a Python number does.
        made: whether it stands for arrays of the user's without being one: no mark can be written on it.
        on_host: whether its type is one of the host's memory.
    """

    shape: tuple[int, ...]
    dtype: Any
    index: int
    weak: bool = False
    made: bool = False
    on_host: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def dtype_name(self) -> str:
        """JAX's short name: f32, bf16, s32, key<fry>..."""
        return short_dtype(self.dtype)

    @property
    def type_name(self) -> str:
        """The same, with its memory if that is the host's, as JAX prints it: f32<host>."""
        return f"{self.dtype_name}<host>" if self.on_host else self.dtype_name

    def __repr__(self) -> str:
        return f"%{self.index}:{self.type_name}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A scalar written in the program; replicated and never resharded."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        return np.asarray(self.value).dtype

    @property
    def number(self) -> float | None:
        """Its value if it is a real number."""
        value = np.asarray(self.value) if self.shape == () else None
        return float(value) if value is not None and _is_real(value.dtype) else None

    def __repr__(self) -> str:
        return f"{np.asarray(self.value).item()!r}" if np.ndim(self.value) == 0 else "const"


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """Two values, one on each side of a region's boundary, whose dimensions must agree.

    Attributes:
        outer: the value outside, or nearer the outside.
        inner: the value inside the body.
        stacked: dimensions that the outer value has in front (the loop dimension of a scan).
    """

    outer: Value
    inner: Value
    stacked: int = 0

    @property
    def rule(self) -> Rule:
        """The edge as an elementwise rule from the outer value to the inner one."""
        return _edge_rule(self.inner.shape, self.stacked)


@tabulated(4096)
def _edge_rule(inner: tuple[int, ...], stacked: int) -> Rule:
    factors = tuple(Factor(n) for n in inner)
    inner_dims: Dims = tuple((i,) for i in range(len(inner)))
    return Rule(factors, (((),) * stacked + inner_dims,), (inner_dims,), component=(0,) * len(inner))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A straight line of equations: the program itself, or the body of a region."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value | Constant, ...]

    def walk(self) -> Iterator[Equation]:
        """All equations in order, those of bodies after the equation they belong to."""
        for equation in self.equations:
            yield equation
            for block in equation.blocks:
                yield from block.walk()

    def runs(self, times: int = 1) -> Iterator[tuple[Equation, int]]:
        """All equations in order, and how often each runs in one call."""
        for equation in self.equations:
            yield equation, times
            for block in equation.blocks:
                yield from block.runs(times * equation.trip_count)

    def values(self) -> Iterator[Value]:
        """All values in order: inputs, and the results of equations, each after what is inside of its bodies."""
        yield from self.inputs
        for equation in self.equations:
            for block in equation.blocks:
                yield from block.values()
            yield from equation.outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One application of a primitive.

    Attributes:
        rule: how it may be split; None for a region.
        blocks: the bodies of a region.
        edges: which values of the bodies must agree with which outside.
        mark: what the user demands of the result, if this is a mark.
        trip_count: how often the bodies run, as far as known (a scan's length; 1 otherwise).
        file: what the user's file is called in ``line``, where another has the same name.
        context: what context managers of JAX add to it, such as ``compute_on``.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Value | Constant, ...]
    outputs: tuple[Value, ...]
    rule: Rule | None
    source_info: Any = None
    blocks: tuple[Block, ...] = ()
    edges: tuple[Edge, ...] = ()
    mark: Mark | None = None
    trip_count: int = 1
    file: str = ""
    context: Context = NO_CONTEXT

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.primitive.name)

    @functools.cached_property
    def line(self) -> str:
        """The user's source line."""
        line = user_line(self.source_info) if self.source_info is not None else ""
        return f"{self.file}{line[line.index(':') :]}" if self.file else line

    def call_file(self, name: str) -> None:
        """Says what the user's file is called, once all files of the program are known."""
        object.__setattr__(self, "file", name)
        self.__dict__.pop("line", None)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    Attributes:
        block: its equations; the first inputs are the arrays that the function closed over.
        captured: those arrays.
        argument_marks: for each argument a mark (from its ``NamedSharding``) or None.
        names: for each input a name to show, such as ``params['wi']``.
        out_tree: the pytree of the results.
        weak: for each result whether its type is weak; none are if it is empty.
        named: the values that have names of dimensions, in order.
        layout: what these mean; None if nothing.
        references: the inputs that are references (``jax.Ref``); their final values are the last results, in this
            order. Those that the function closes over are its last inputs.
        looks: where the function asks how an array is sharded (``jax.debug.inspect_array_sharding``). They are no
            equations: the program is the one without them.
        watched: makes the program in which each look is an equation that reads its operand, to plan what the program
            does not hold; None without looks.
        finite: whether the user says that parts of sums of floats are finite: they may pass more equations then.
        decomposed: blocks that take the place of ``block``, by how many parts its values are in
            (``planning.decompose``); programs with other marks share them.
        input_memories: for each input the memory kind in which it comes; those of its type if it is empty.
        output_memories: the same for each result.
        dropped: what the function says and the program does not keep.
        fired: the rewrites that fired (``gshard.rewrite``), in order.
        unread_marks: marks whose results nothing reads, as text.
    """

    block: Block
    captured: tuple[Any, ...]
    argument_marks: tuple[Mark | None, ...]
    names: tuple[str, ...]
    out_tree: Any
    name: str = "f"
    weak: tuple[bool, ...] = ()
    named: tuple[Named, ...] = ()
    layout: Layout | None = None
    references: tuple[int, ...] = ()
    looks: tuple[Look, ...] = ()
    watched: Callable[[], Program] | None = None
    finite: bool = False
    decomposed: Cache = dataclasses.field(default_factory=lambda: Cache(_DECOMPOSED))
    input_memories: tuple[str, ...] = ()
    output_memories: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    fired: tuple[Fired, ...] = ()
    unread_marks: tuple[str, ...] = ()

    def input_memory(self, i: int) -> str:
        """The memory kind in which an input comes."""
        return self.input_memories[i] if self.input_memories else kind_in_space(self.block.inputs[i].on_host)

    def output_memory(self, i: int) -> str:
        """The memory kind in which a result leaves."""
        made = self.block.outputs[i]
        typed = kind_in_space(isinstance(made, Value) and made.on_host)
        return self.output_memories[i] if self.output_memories else typed

    @property
    def input_marks(self) -> tuple[Mark | None, ...]:
        """For each input, captured arrays included, its mark or None."""
        return (*(None for _ in self.captured), *self.argument_marks)

    def final_values(self) -> list[tuple[int, Value | Constant]]:
        """The inputs that are references, and the results that are their final values."""
        if not self.references:
            return []
        return list(zip(self.references, self.block.outputs[-len(self.references) :], strict=True))

    def state(self, inputs: Iterable[int]) -> list[tuple[int, Value]]:
        """Those of some inputs for which there is a result of the same shape and dtype, with that result.

        In a training step these are the state that goes from call to call. Each result is taken once. Of a reference it
        is its final value.
        """
        free = [v for v in self.block.outputs if isinstance(v, Value) and v not in self.block.inputs]
        final, found = dict(self.final_values()), []
        for i in inputs:
            own = self.block.inputs[i]
            if i in final:
                after = next((v for v in free if v is final[i]), None)
            else:
                kind = own.shape, own.dtype, own.on_host
                after = next((v for v in free if (v.shape, v.dtype, v.on_host) == kind), None)
            if after is not None:
                free.remove(after)
                found.append((i, after))
        return found

    def __str__(self) -> str:
        return f"program {self.name}\n{format_block(self.block)}"


def format_block(block: Block, indent: str = "  ") -> str:
    """Equations as text, one a line, bodies indented."""
    lines = [f"{indent}({', '.join(map(repr, block.inputs))}) ->"]
    for e in block.equations:
        what = f"{e.name}[{e.mark}]" if e.mark else e.name
        what = f"{what}{e.context}" if e.context else what
        rule = f"   # {e.rule}" if e.rule is not None and not e.mark else ""
        lines.append(f"{indent}{', '.join(map(repr, e.outputs))} = {what} {', '.join(map(_short, e.inputs))}{rule}")
        lines.extend(format_block(b, indent + "    ") for b in e.blocks)
    lines.append(f"{indent}return {', '.join(map(_short, block.outputs))}")
    return "\n".join(lines)


def _short(x: Value | Constant) -> str:
    return f"%{x.index}" if isinstance(x, Value) else repr(x)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a PRNG key counts as the words it is made of."""
    return dtype.itemsize if isinstance(dtype, np.dtype) else np.dtype(dtype).itemsize if _is_numpy(dtype) else 8


def _is_numpy(dtype: Any) -> bool:
    try:
        np.dtype(dtype)
    except TypeError:
        return False
    return True


def _is_real(dtype: Any) -> bool:
    return _is_numpy(dtype) and any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.floating, np.integer))


def short_dtype(dtype: Any) -> str:
    """JAX's short name of a dtype."""
    name = str(dtype.name) if hasattr(dtype, "name") else str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c")):
        if name.startswith(long):
            return short + name[len(long) :]
    return "pred" if name == "bool" else name


def format_bytes(n: int) -> str:
    """Bytes for people.

    >>> format_bytes(1536), format_bytes(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def format_flops(n: float) -> str:
    """Floating-point operations for people.

    >>> format_flops(2.064e13), format_flops(20)
    ('20.64 TFLOP', '20 FLOP')
    """
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.4g} FLOP"
