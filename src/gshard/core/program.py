"""Defines the program: the user's function as equations over values, with marks, contexts and records of changes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import Cache
from gshard.core.jax_adapter_lowering import branches_on
from gshard.core.layout import Layout, Named
from gshard.core.mark import Mark
from gshard.core.memory_kinds import kind_in_space
from gshard.core.number_text import in_unit
from gshard.core.planning_tables import tabulated
from gshard.core.rule import Dims, Factor, Rule

# Defines the context of an equation: the compute type and XLA metadata that JAX's context managers set.


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The context of an equation.

    >>> Context(metadata=(("a", 1), ("b", 2))).inside(Context("device_host", (("b", 3), ("c", 4))))
    Context(compute_type='device_host', metadata=(('a', 1), ('b', 2), ('c', 4)))
    >>> print(Context("device_host", (("b", 3),)))
    {compute_on=device_host, b=3}
    """

    compute_type: str | None = None  # the argument of ``compute_on``; None outside of ``compute_on``
    metadata: tuple[tuple[str, Any], ...] = ()  # keys and values of ``set_xla_metadata``, sorted by key

    def __bool__(self) -> bool:
        return self.compute_type is not None or bool(self.metadata)

    def inside(self, outer: Context) -> Context:
        """This context within the context of an enclosing call. Where both set a value, the inner value applies."""
        if not self or not outer or self == outer:
            return self or outer
        metadata = {**dict(outer.metadata), **dict(self.metadata)}
        return Context(self.compute_type or outer.compute_type, tuple(sorted(metadata.items())))

    def __str__(self) -> str:
        compute_on = () if self.compute_type is None else (("compute_on", self.compute_type),)
        return f"{{{', '.join(f'{key}={value}' for key, value in (*compute_on, *self.metadata))}}}"


NO_CONTEXT = Context()


# Defines the record of a feature of an equation that gshard does not keep.

MESH = "mesh"  # the option of an inner ``gshard.jit`` whose value is the axes of its mesh, as text


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """One feature that gshard does not keep.

    >>> print(Dropped("name of composite", "'my.op'", "train.py:41 (loss)", "It is compiled as its decomposition."))
    train.py:41 (loss): name of composite is 'my.op'. It is compiled as its decomposition.
    """

    what: str  # the parameter and its primitive, such as ``out_layouts of jit``
    value: str  # the value of the parameter, as text
    line: str  # the user's source line of the equation
    why: str  # a sentence that states what gshard does instead
    # the name and the value of an option of an inner ``gshard.jit``. gshard keeps the option if the outer
    # ``gshard.jit`` has the same value.
    option: tuple[str, Hashable] | None = None

    def __str__(self) -> str:
        return f"{f'{self.line}: ' if self.line else ''}{self.what} is {self.value}. {self.why}"


# Defines the record of a rewrite that has changed a program.

# Rewrites that are no modules of ``gshard.rewrite``. Their notes describe what they made.
BATCH_EQUAL_FUNCTIONS, RUN_AS_PIPELINE = "batch_equal_functions", "run_as_pipeline"


@dataclasses.dataclass(frozen=True, slots=True)
class Fired:
    """One rewrite that has changed a program.

    >>> print(Fired("sink_pad", "train.py:12 (loss)", ("pad",), ("pad", "pad", "add", "select_n")))
    sink_pad at train.py:12 (loss): pad -> 2 pad, add, select_n
    """

    # the name of the rewrite: of a module in ``gshard.rewrite``, ``batch_equal_functions`` (``planning.batched``) or
    # ``run_as_pipeline`` (``planning.pipelined``)
    rewrite: str
    line: str  # the user's source line of the first replaced equation
    # before, after: the primitive names of the replaced equations, and of the equations in their place
    before: tuple[str, ...]
    after: tuple[str, ...]
    note: str = ""  # the functions that it batches or the pipeline, as text; empty for other rewrites

    def __str__(self) -> str:
        location = f" at {self.line}" if self.line else ""
        return f"{self.rewrite}{location}: {_counted(self.before)} -> {_counted(self.after)}"


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in Counter(names).items()) or "nothing"


_DECOMPOSED = 8  # decomposed blocks that a program caches


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One array of a program: an argument or the result of an equation. Compared by identity."""

    shape: tuple[int, ...]  # the global shape
    dtype: Any  # the dtype
    index: int  # the number of the value in printed programs
    weak: bool = False  # whether its type is weak, like the type of a Python number
    made: bool = False  # whether gshard has created the value, so that the user cannot put a mark on it
    on_host: bool = False  # whether its type is of the host's memory space

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def dtype_name(self) -> str:
        """JAX's short name of the dtype: f32, bf16, s32, key<fry>..."""
        return short_dtype(self.dtype)

    @property
    def type_name(self) -> str:
        """The short name of the dtype, followed by ``<host>`` for a value in host memory, as JAX prints it."""
        return f"{self.dtype_name}<host>" if self.on_host else self.dtype_name

    def __repr__(self) -> str:
        return f"%{self.index}:{self.type_name}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A literal of the program. It is replicated and never resharded."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        known = getattr(self.value, "dtype", None)  # a literal of JAX 0.12 is a float of Python with a dtype
        return np.asarray(self.value).dtype if known is None else known

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def number(self) -> float | None:
        """The value as a float if it is a real scalar; otherwise None."""
        value = np.asarray(self.value) if self.shape == () else None
        return float(value) if value is not None and _is_real(value.dtype) else None

    def __repr__(self) -> str:
        return f"{np.asarray(self.value).item()!r}" if np.ndim(self.value) == 0 else "const"


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """Two values at the boundary of a region whose shardings must agree."""

    outer: Value  # the value outside, or closer to the outside
    inner: Value  # the value inside the body
    stacked: int = 0  # the number of additional leading dimensions of the outer value (the loop dimension of a scan)

    @property
    def rule(self) -> Rule:
        """The edge as an elementwise rule from the outer to the inner value."""
        return _edge_rule(self.inner.shape, self.stacked)


@tabulated(4096)
def _edge_rule(inner: tuple[int, ...], stacked: int) -> Rule:
    factors = tuple(Factor(n) for n in inner)
    inner_dims: Dims = tuple((i,) for i in range(len(inner)))
    return Rule(factors, (((),) * stacked + inner_dims,), (inner_dims,), component=(0,) * len(inner))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A sequence of equations: the program itself, or the body of a region."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value | Constant, ...]

    def walk(self, devices: Sequence[Any] | None = None) -> Iterator[Equation]:
        """All equations in order; equations of bodies follow the equation that contains them."""
        for equation in self.equations:
            yield equation
            for block in equation.blocks_on(devices):
                yield from block.walk(devices)

    def blocks(self) -> Iterator[Block]:
        """This block and the bodies of all equations."""
        yield self
        for equation in self.walk():
            yield from equation.blocks

    def runs(self, times: int = 1) -> Iterator[tuple[Equation, int]]:
        """All equations in order, each with the number of its runs in one call."""
        for equation in self.equations:
            yield equation, times
            for block in equation.blocks:
                yield from block.runs(times * equation.trip_count)

    def values(self) -> Iterator[Value]:
        """All values in order: inputs, then the results of each equation after the values of its bodies."""
        yield from self.inputs
        for equation in self.equations:
            for block in equation.blocks:
                yield from block.values()
            yield from equation.outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One application of a primitive."""

    primitive: Any  # the JAX primitive
    params: dict[str, Any]  # its parameters
    inputs: tuple[Value | Constant, ...]  # the operands
    outputs: tuple[Value, ...]  # the results
    rule: Rule | None  # the rule that states how the equation can be split; None for a region
    source_info: Any = None  # JAX's source information, from which ``line`` is read
    blocks: tuple[Block, ...] = ()  # the bodies of a region
    edges: tuple[Edge, ...] = ()  # pairs of values of the bodies and outside that must agree
    mark: Mark | None = None  # the user's sharding constraint on the result, if the equation is a mark
    trip_count: int = 1  # the number of runs of the bodies, if known (the length of a scan; 1 otherwise)
    file: str = ""  # the name of the user's file in ``line``, if several files of the program have the same name
    context: Context = NO_CONTEXT  # settings of JAX's context managers, such as ``compute_on``

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.primitive.name)

    @functools.cached_property
    def line(self) -> str:
        """The user's source line."""
        line = user_line(self.source_info) if self.source_info is not None else ""
        return f"{self.file}{line[line.index(':') :]}" if self.file else line

    def blocks_on(self, devices: Sequence[Any] | None) -> tuple[Block, ...]:
        """The bodies that run on these devices: of ``lax.platform_dependent`` the branch of their platform."""
        platforms = self.params.get("branches_platforms")
        if platforms is None or not devices:
            return self.blocks
        return tuple(self.blocks[i] for i in branches_on(devices, platforms))

    @property
    def operator_rule(self) -> Rule:
        """The rule of an equation that is no region."""
        assert self.rule is not None
        return self.rule

    def call_file(self, name: str) -> None:
        """Sets the name of the user's file in ``line``, after all files of the program are known."""
        object.__setattr__(self, "file", name)
        self.__dict__.pop("line", None)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    Attributes:
        block: the equations. The first inputs are the captured arrays.
        captured: the arrays that the function closes over.
        argument_marks: for each argument a mark (from its ``NamedSharding``) or None.
        names: the name of each input in printed text, such as ``params['wi']``.
        out_tree: the pytree structure of the results.
        name: the name of the function.
        weak: whether the type of each result is weak; an empty tuple means that none is.
        named: the values whose dimensions have names, in order.
        layout: the layout that maps these names to mesh axes; None without a layout.
        references: the numbers of the inputs that are references (``jax.Ref``). Their final values are the last
            results, in this order. References that the function closes over are the last inputs.
        finite: whether the user states that parts of sums of floats are finite, so that they may pass more equations.
        decomposed: cache of blocks that replace ``block``, for the numbers of parts of its values
            (``planning.settled``). Programs with other marks share it.
        input_memories: the memory kind of each input; an empty tuple means the memory kinds of the types.
        output_memories: the memory kind of each result, like ``input_memories``.
        dropped: features of the function that the program does not keep.
        fired: the rewrites that have changed the program (``gshard.rewrite``), in order.
        unread_marks: texts of marks whose results nothing reads, or only a mark that undoes them.
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
    finite: bool = False
    decomposed: Cache = dataclasses.field(default_factory=lambda: Cache(_DECOMPOSED))
    input_memories: tuple[str, ...] = ()
    output_memories: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    fired: tuple[Fired, ...] = ()
    unread_marks: tuple[str, ...] = ()

    def input_memory(self, i: int) -> str:
        """The memory kind of an input."""
        return self.input_memories[i] if self.input_memories else kind_in_space(self.block.inputs[i].on_host)

    def output_memory(self, i: int) -> str:
        """The memory kind of a result."""
        if self.output_memories:
            return self.output_memories[i]
        output = self.block.outputs[i]
        return kind_in_space(isinstance(output, Value) and output.on_host)

    @functools.cached_property
    def producers(self) -> dict[Value, Equation]:
        """The equation that computes each value, in bodies too."""
        return {v: e for e in self.block.walk() for v in e.outputs}

    @property
    def input_marks(self) -> tuple[Mark | None, ...]:
        """The mark of each input, including captured arrays, or None."""
        return (*(None for _ in self.captured), *self.argument_marks)

    @property
    def batches(self) -> tuple[str, ...]:
        """Texts of the equal functions that run as batches (``planning.batched``)."""
        return tuple(fired.note for fired in self.fired if fired.note and fired.rewrite == BATCH_EQUAL_FUNCTIONS)

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Texts of the loops that run as pipelines (``planning.pipelined``)."""
        return tuple(fired.note for fired in self.fired if fired.note and fired.rewrite == RUN_AS_PIPELINE)

    def final_values(self) -> list[tuple[int, Value | Constant]]:
        """Pairs of the number of an input that is a reference and the result that is its final value."""
        if not self.references:
            return []
        return list(zip(self.references, self.block.outputs[-len(self.references) :], strict=True))

    def state(self, inputs: Iterable[int]) -> list[tuple[int, Value]]:
        """Pairs of an input and a result of the same shape, dtype and memory that can replace it.

        In a training step these are the state that goes from call to call. Each result occurs once. The result of a
        reference is its final value.

        Args:
            inputs: the numbers of the inputs to consider.
        """
        free_results = [v for v in self.block.outputs if isinstance(v, Value) and v not in self.block.inputs]
        final_values = dict(self.final_values())
        pairs = []
        for i in inputs:
            before = self.block.inputs[i]
            if i in final_values:
                after = next((v for v in free_results if v is final_values[i]), None)
            else:
                type_before = before.shape, before.dtype, before.on_host
                after = next((v for v in free_results if (v.shape, v.dtype, v.on_host) == type_before), None)
            if after is not None:
                free_results.remove(after)
                pairs.append((i, after))
        return pairs

    def __str__(self) -> str:
        return f"program {self.name}\n{format_block(self.block)}"


def _rule_text(e: Equation) -> str:
    return f"   # {e.rule}" if e.rule is not None and not e.mark else ""


def format_block(
    block: Block,
    indent: str = "  ",
    value: Callable[[Value], str] = repr,
    comment: Callable[[Equation], str] = _rule_text,
) -> str:
    """The text of a block: one equation a line, with indented bodies."""
    lines = [f"{indent}({', '.join(map(value, block.inputs))}) ->"]
    for e in block.equations:
        primitive = f"{e.name}[{e.mark}]" if e.mark else e.name
        primitive = f"{primitive}{e.context}" if e.context else primitive
        operands = ", ".join(map(_short, e.inputs))
        lines.append(f"{indent}{', '.join(map(value, e.outputs))} = {primitive} {operands}{comment(e)}")
        lines.extend(format_block(b, indent + "    ", value, comment) for b in e.blocks)
    lines.append(f"{indent}return {', '.join(map(_short, block.outputs))}")
    return "\n".join(lines)


def _short(x: Value | Constant) -> str:
    return f"%{x.index}" if isinstance(x, Value) else repr(x)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; 8 for a PRNG key."""
    if isinstance(dtype, np.dtype):
        return dtype.itemsize
    return np.dtype(dtype).itemsize if _is_numpy(dtype) else 8


def _is_numpy(dtype: Any) -> bool:
    try:
        np.dtype(dtype)
    except TypeError:
        return False
    return True


def _is_real(dtype: Any) -> bool:
    return _is_numpy(dtype) and any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.floating, np.integer))


@tabulated(256)
def short_dtype(dtype: Any) -> str:
    """JAX's short name of a dtype."""
    name = str(dtype.name) if hasattr(dtype, "name") else str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c")):
        if name.startswith(long):
            return short + name[len(long) :]
    return "pred" if name == "bool" else name


def type_text(x: Any, shape: Sequence[int] | None = None) -> str:
    """The short dtype and the shape of an array, or the dtype of an array with another shape: ``f32[8,4]``."""
    return f"{short_dtype(x.dtype)}[{','.join(map(str, x.shape if shape is None else shape))}]"


def format_bytes(n: int) -> str:
    """A number of bytes as text with a unit.

    >>> format_bytes(1536), format_bytes(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if round(value, 1) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def format_flops(n: float) -> str:
    """A number of floating-point operations as text with a unit.

    >>> format_flops(2.064e13), format_flops(20)
    ('20.64 TFLOP', '20 FLOP')
    """
    units = ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1.0)
    return in_unit(n, units, 4)
