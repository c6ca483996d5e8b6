"""From HLO: what XLA's SPMD partitioner made of a lowered function, as a JAX program.

``partitioned`` compiles a lowered function, reads the module that XLA's partitioner leaves (the program of one device,
with every collective, before XLA fuses and reorders instructions), and turns it into a jaxpr of ``jax.lax`` primitives:
one ``shard_map`` over the mesh of the function. Equations have the source lines of their instructions.
"""

from __future__ import annotations

import functools
import re
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import TraceError
from gshard.core.jax_adapter import Frame, bind, closed, impl_of_keys, no_mesh_set, shapes_of
from gshard.core.jax_adapter_dispatch import kept_arguments
from gshard.core.mark import resolve
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tabulated
from gshard.tracing.expand import mark_of_any_sharding
from gshard.xla.hlo_collectives import groups_of, pairs_of
from gshard.xla.hlo_parser import BRANCHES, Computation, Instruction, Module, arrays_of, read_module

_PASS = "spmd-partitioning"
_LEAST_TIME = "jax_persistent_cache_min_compile_time_secs"


def partitioned(lowered: jax.stages.Lowered) -> Any:
    """Compiles a lowered function; returns what XLA's partitioner makes of it.

    Neither the environment nor files that remain are used, and JAX's persistent compilation cache neither answers nor
    keeps this compilation.

    Returns:
        a closed jaxpr from the whole flat arguments to the whole flat results.

    Raises:
        TraceError: XLA wrote no module, an array is split in a way that no mesh axes describe, or an instruction has no
            counterpart in JAX.
    """
    module, compiled = _compiled(lowered)
    kept, arguments, results = (
        sorted(kept_arguments(compiled)),
        *map(jax.tree.leaves, (lowered.in_avals, lowered.out_info)),
    )
    takes: Any = lowered.in_tree.flatten_up_to(compiled.input_shardings)  # type: ignore[attr-defined]
    gives: Any = lowered.out_tree.flatten_up_to(compiled.output_shardings)  # type: ignore[attr-defined]
    takes = [takes[i] for i in kept]
    meshes = (s.mesh for s in (*takes, *gives) if isinstance(s, NamedSharding) and s.mesh.size == module.devices)
    mesh = Mesh.of(next(meshes, {"devices": module.devices}))
    shapes = [x.shape for x in (*(arguments[i] for i in kept), *results)]
    specs = [_spec(s, shape, mesh) for s, shape in zip((*takes, *gives), shapes, strict=True)]
    reader = _Reader(module, mesh)

    def local(*arrays: Any) -> tuple[Any, ...]:
        found = reader.run(module.entry, arrays)
        return found if isinstance(found, tuple) else (found,)

    def whole(*arrays: Any) -> tuple[Any, ...]:
        read = [jax.random.key_data(arrays[i]) if _is_key(arrays[i]) else arrays[i] for i in kept]
        run = local
        if mesh.size > 1:
            ins, outs = tuple(specs[: len(kept)]), tuple(specs[len(kept) :])
            run = jax.shard_map(local, mesh=mesh.abstract_jax_mesh, in_specs=ins, out_specs=outs, check_vma=False)
        return tuple(
            jax.random.wrap_key_data(x, impl=impl_of_keys(like)) if _is_key(like) else x
            for x, like in zip(run(*read), results, strict=True)
        )

    with no_mesh_set(), jax.enable_x64(True):  # numbers of 64 bits may be inside of a program without such arguments
        return jax.make_jaxpr(whole)(*shapes_of(arguments))


def _compiled(lowered: jax.stages.Lowered) -> tuple[Module, jax.stages.Compiled]:
    """The program of one device as the partitioner leaves it, and the compiled program."""
    seconds = getattr(jax.config, _LEAST_TIME)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": _PASS}
        options["xla_dump_large_constants"] = True  # this also changes the key in the persistent cache
        jax.config.update(_LEAST_TIME, 1e9)  # seconds: no compilation takes as long
        try:
            compiled = lowered.compile(compiler_options=options)
        finally:
            jax.config.update(_LEAST_TIME, seconds)
        # XLA does not partition a program of one device.
        texts = [p.read_text() for n in (f"after_{_PASS}", "before_optim") for p in Path(folder).glob(f"*.{n}*.txt")]
    module = read_module(texts[0]) if texts else None
    if module is None or (module.devices > 1 and len(texts) == 1):
        raise TraceError(
            "XLA did not write the program that its partitioner made.",
            hint="Take programs compiled with xla_dump_large_constants out of JAX's persistent compilation cache.",
        )
    return module, compiled


def _spec(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """A sharding as atoms of a mesh."""
    if mesh.size == 1:
        return PartitionSpec()
    found = resolve(mark_of_any_sharding(sharding, shape), mesh, shape, "")
    if found.order != mesh.order or any(n % mesh.count(along) for n, along in zip(shape, found.dims, strict=True)):
        raise TraceError("an array is split in a way that mesh axes do not describe.", got=f"{shape}: {sharding}")
    return PartitionSpec(*(along or None for along in found.dims))


# Functions that JAX or XLA writes out, by polynomials and the like, before it partitions.
_WRITTEN_OUT = frozenset(
    """acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cosh digamma erf_inv erfc igamma igamma_grad_a igammac
    lgamma polygamma random_gamma_grad regularized_incomplete_beta sinh zeta""".split()
)


def written_out(eqn: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The jaxpr of what XLA is given of an operator, for operands of these shapes; None where that is the operator."""
    if eqn.primitive.name not in _WRITTEN_OUT:
        return None
    types = tuple(jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in zip(shapes, eqn.invars, strict=True))
    found = _alone(eqn.primitive, tuple(eqn.params.items()), types)
    return None if any(e.primitive is eqn.primitive for e in closed(found)[0].eqns) else found


@tabulated(1024)
def _alone(primitive: Any, params: tuple[tuple[str, Any], ...], types: tuple[Any, ...]) -> Any:
    with no_mesh_set():
        return partitioned(jax.jit(lambda *x: bind(primitive, dict(params), x)).lower(*types))


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _run(call: Callable[[], Any]) -> Any:
    return call()


def _in_frame(frame: Frame, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call from a frame of this file, line and function."""
    file, line, function = frame
    name = function or "<module>"
    code = _run.__code__.replace(co_filename=file, co_firstlineno=line - 1, co_name=name, co_qualname=name)
    return functools.partial(types.FunctionType(code, {}), call)


class _Reader:
    """Runs the computations of a module on JAX arrays, as one device of a mesh does."""

    def __init__(self, module: Module, mesh: Mesh):
        self.module, self.mesh = module, mesh

    def run(self, name: str, arguments: Sequence[Any]) -> Any:
        """The result of a computation: an array, or a tuple of results."""
        computation = self.module.computations[name]
        values: dict[str, Any] = {}
        frames: dict[str, tuple[Frame, ...]] = {}
        for name, made in computation.instructions.items():
            # What XLA adds without a line belongs to what it reads.
            inherited = (frames[o] for o in made.operands if frames.get(o))
            frames[name] = self.module.frames_of(made) or next(inherited, ())
            if made.opcode == "parameter":
                values[name] = arguments[made.number]
                continue
            call: Callable[[], Any] = functools.partial(self._checked, made, [values[o] for o in made.operands])
            for frame in frames[name]:  # the first is the innermost
                call = _in_frame(frame, call)
            values[name] = call()
        return values[computation.root]

    def _checked(self, made: Instruction, operands: Sequence[Any]) -> Any:
        run = _INSTRUCTIONS.get(made.opcode) or getattr(self, f"_{made.opcode.replace('-', '_')}", None)
        try:
            if run is None:
                raise NotImplementedError
            found = run(made, *operands)
            kinds, wanted = ([(np.shape(x), x.dtype) for x in own] for own in (jax.tree.leaves(found), _types_of(made)))
            if kinds != wanted:
                raise TypeError(f"the translation has the type {jax.tree.map(jax.typeof, found)}")
        except TraceError:
            raise
        except Exception as error:
            target = made.text("custom_call_target")
            raise TraceError(
                f"the {f'custom call {target!r}' if target else f'HLO instruction {made.opcode!r}'} has no translation "
                f"to JAX{str(error) and f': {error}'}.",
                self.module.line_of(made) or None,
                f"%{made.name} = {made.type} {made.opcode}({made.literal}){made.attributes}"[:300],
            ) from error
        return found

    # Instructions that contain computations.

    def _operation(self, made: Instruction, attribute: str = "to_apply") -> str:
        """The function of two numbers that an instruction applies, as ``add``, ``GE``, ``parameter(1)`` or a text."""
        text = _expression(self.module.computations[made.called(attribute)[0]])
        swapped = text.removesuffix("(parameter(1),parameter(0))")
        return swapped if swapped in _COMBINED else text.removesuffix("(parameter(0),parameter(1))")

    def _combining(self, made: Instruction, *x: Any) -> tuple[Any, Any, Callable[..., Any]]:
        """Operands, initial values and the function of a reduction, as ``lax.reduce`` takes them."""
        (name,), n = made.called("to_apply"), len(x) // 2
        if n > 1:
            return x[:n], x[n:], lambda a, b: self.run(name, [*a, *b])
        return *x, _COMBINED.get(self._operation(made)) or (lambda a, b: self.run(name, [a, b]))

    def _reduce(self, made: Instruction, *x: Any) -> Any:
        return lax.reduce(*self._combining(made, *x), made.numbers("dimensions"))

    def _reduce_window(self, made: Instruction, *x: Any) -> Any:
        return lax.reduce_window(*self._combining(made, *x), **_window_of(made)[0])

    def _select_and_scatter(self, made: Instruction, x: Any, source: Any, init: Any) -> Any:
        (window, _), chosen = _window_of(made), {"GE": lax.ge_p, "LE": lax.le_p}.get(self._operation(made, "select"))
        if chosen is None or self._operation(made, "scatter") != "add" or np.any(init != 0):
            raise NotImplementedError
        del window["base_dilation"], window["window_dilation"]
        return primitives.select_and_scatter_add_p.bind(source, x, select_prim=chosen, **window)

    def _scatter(self, made: Instruction, x: Any, indices: Any, update: Any) -> Any:
        numbers, scatter = _dimensions(lax.ScatterDimensionNumbers, made), _SCATTERED[self._operation(made)]
        return scatter(x, _vectors_last(made, indices), update, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)

    def _sort(self, made: Instruction, *x: Any) -> Any:
        keys = _sorted_by(self.module.computations[made.called("to_apply")[0]], x)
        (dim,), is_stable = made.numbers("dimensions"), made.text("is_stable") == "true"
        found = lax.sort(x, dimension=dim, is_stable=is_stable, num_keys=keys)
        return tuple(found) if made.type.startswith("(") else found[0]

    def _while(self, made: Instruction, x: Any) -> Any:
        condition, body = (made.called(attribute)[0] for attribute in ("condition", "body"))
        return lax.while_loop(lambda x: self.run(condition, [x]), lambda x: self.run(body, [x]), x)

    def _conditional(self, made: Instruction, index: Any, *x: Any) -> Any:
        names = [name for attribute in BRANCHES for name in made.called(attribute)]
        branches = [lambda *x, i=i, name=name: self.run(name, [x[i]]) for i, name in enumerate(names)]
        if index.dtype == np.bool_:
            return lax.cond(index, *branches, *x)
        last = np.int32(len(branches) - 1)  # of an index that is out of range
        return lax.switch(lax.select(lax.lt(index, np.int32(0)), last, index), branches, *x)

    def _call(self, made: Instruction, *x: Any) -> Any:
        return self.run(made.called("to_apply")[0], x)

    # What devices do together.

    def _partition_id(self, made: Instruction) -> Any:
        return lax.convert_element_type(lax.axis_index(self.mesh.atoms) if self.mesh.size > 1 else 0, np.uint32)

    def _on_groups(self, run: Callable[..., Any], dims: str, made: Instruction, x: Any) -> Any:
        """Runs a collective on groups of devices; ``dims`` are its parameters that are the dimension."""
        groups = groups_of(made, self.module, ordered=True)
        if self.mesh.size == 1:
            return x
        if len({*map(len, groups)}) > 1:
            raise NotImplementedError("groups differ in size")
        options = dict.fromkeys(dims.split(), *made.numbers("dimensions")) | {"tiled": True} if dims else {}
        return run(x, axis_name=self.mesh.atoms, axis_index_groups=groups, **options)

    _all_gather = functools.partialmethod(_on_groups, lax.all_gather, "axis")
    _all_to_all = functools.partialmethod(_on_groups, lax.all_to_all, "split_axis concat_axis")

    def _reduce_scatter(self, made: Instruction, x: Any) -> Any:
        if self._operation(made) != "add" or x.dtype == np.bool_:
            raise NotImplementedError
        return self._on_groups(lax.psum_scatter, "scatter_dimension", made, x)

    def _all_reduce(self, made: Instruction, x: Any) -> Any:
        operation = self._operation(made)
        collective = {"add": lax.psum, "maximum": lax.pmax, "minimum": lax.pmin}.get(operation)
        if self.mesh.size == 1 or (collective is not None and x.dtype != np.bool_):
            return self._on_groups(collective or lax.psum, "", made, x)
        return functools.reduce(_COMBINED[operation], self._on_groups(lax.all_gather, "", made, x))

    def _collective_permute(self, made: Instruction, x: Any) -> Any:
        pairs = pairs_of(made)
        return x if self.mesh.size == 1 and pairs else lax.ppermute(x, self.mesh.atoms, pairs)


# The other instructions, and their attributes.

_KINDS = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex", "pred": "bool"}
_ELEMENTWISE = """
    abs acos acosh add and=bitwise_and asin asinh atan atan2 atanh cbrt ceil clamp complex cosh cosine=cos
    count-leading-zeros=clz divide=div erf exponential=exp exponential-minus-one=expm1 floor imag is-finite log
    log-plus-one=log1p logistic maximum=max minimum=min multiply=mul negate=neg not=bitwise_not
    opt-barrier=optimization_barrier or=bitwise_or popcnt=population_count power=pow real remainder=rem rsqrt select
    shift-left shift-right-arithmetic shift-right-logical sign sine=sin sinh sqrt subtract=sub tan tanh xor=bitwise_xor
"""
_COMBINED: Mapping[str, Callable[..., Any]] = {
    "add": lax.add, "multiply": lax.mul, "maximum": lax.max, "minimum": lax.min, "and": lax.bitwise_and,
    "or": lax.bitwise_or, "xor": lax.bitwise_xor,
}  # fmt: skip
"""What combines the elements of a reduction, as ``lax.reduce`` recognizes it."""

_SCATTERED = {"parameter(1)": lax.scatter, "add": lax.scatter_add, "multiply": lax.scatter_mul,
              "maximum": lax.scatter_max, "minimum": lax.scatter_min}  # fmt: skip


def _elementwise(name: str) -> Callable[..., Any]:
    run = getattr(lax, name)
    return lambda m, *x: run(*x)


def _expression(computation: Computation, name: str = "") -> str:
    """What a computation returns, as text: ``add(parameter(0),parameter(1))``."""
    made = computation.behind(name or computation.root, ("copy",))
    assert made is not None
    inside = ",".join(_expression(computation, o) for o in made.operands) or made.literal
    return f"{made.text('direction') or made.opcode}({inside})"


def _sorted_by(comparator: Computation, operands: Sequence[Any]) -> int:
    """By how many operands a comparator sorts, if it is one of ``lax.sort``: all NaNs are equal, and both zeros."""

    def key(number: int, dtype: Any) -> str:
        x = f"parameter({number})"
        if not jax.dtypes.issubdtype(dtype, np.floating):
            return x
        return f"select(NE({x},{x}),constant(nan),select(EQ({x},constant(0)),constant(0),{x}))"

    found, wanted = _expression(comparator), "{}"
    for n, x in enumerate(operands):
        keys = f"({key(2 * n, x.dtype)},{key(2 * n + 1, x.dtype)})"
        if found == wanted.format(f"LT{keys}"):
            return n + 1
        wanted = wanted.format(f"or(LT{keys},and(EQ{keys},{{}}))")
    raise NotImplementedError("its comparator is not that of jax.lax.sort")


def _types_of(made: Instruction) -> list[jax.ShapeDtypeStruct]:
    """The types of the results of an instruction."""
    names = ((a.shape, re.sub("^[a-z]+", lambda kind: _KINDS[kind[0]], a.dtype)) for a in arrays_of(made.type))
    return [jax.ShapeDtypeStruct(shape, name.replace("8e", "8_e")) for shape, name in names]


def _numbers(parts: Sequence[str], between: str) -> list[Any]:
    return [tuple(map(int, part.split(between))) for part in parts]


def _window_of(made: Instruction) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A window as ``lax.reduce_window`` describes it, and its dimensions that are reversed."""
    parts = {key: value.split("x") for key, _, value in (p.partition("=") for p in made.text("window").split())}
    rank = len(parts.get("size", ()))
    names = {"size": "window_dimensions", "stride": "window_strides", "lhs_dilate": "base_dilation",
             "rhs_dilate": "window_dilation"}  # fmt: skip
    found: dict[str, Any] = {name: tuple(map(int, parts.get(key, [1] * rank))) for key, name in names.items()}
    found["padding"] = tuple(_numbers(parts.get("pad", ["0_0"] * rank), "_"))
    return found, tuple(i for i, flipped in enumerate(parts.get("rhs_reversal", ())) if flipped == "1")


def _precision(made: Instruction) -> Any:
    algorithm, names = made.text("algorithm"), made.text("operand_precision")
    if algorithm:
        return lax.DotAlgorithmPreset[algorithm.removeprefix("dot_").upper()]
    return tuple(map(lax.Precision, names.split(","))) if names else None


def _dot(made: Instruction, x: Any, y: Any) -> Any:
    sides = "lhs", "rhs"
    numbers: Any = [[made.numbers(f"{side}_{name}_dims") for side in sides] for name in ("contracting", "batch")]
    return lax.dot_general(x, y, numbers, _precision(made), _types_of(made)[0].dtype)


def _convolution(made: Instruction, x: Any, kernel: Any) -> Any:
    (window, flipped), spatial = _window_of(made), "".join(map(str, range(x.ndim - 2)))
    labels = zip(re.split("_|->", made.text("dim_labels")), ("bf", "oi", "bf"), strict=True)
    lhs, rhs, out = (tuple(text.index(c) for c in first + spatial) for text, first in labels)
    kernel = lax.rev(kernel, [rhs[2 + i] for i in flipped]) if flipped else kernel
    (features,), (batches,) = (made.numbers(f"{kind}_group_count") or (1,) for kind in ("feature", "batch"))
    return lax.conv_general_dilated(
        x, kernel, window["window_strides"], window["padding"], window["base_dilation"],
        window["window_dilation"], lax.ConvDimensionNumbers(lhs, rhs, out), features, batches, _precision(made),
        _types_of(made)[0].dtype,
    )  # fmt: skip


def _compare(made: Instruction, x: Any, y: Any) -> Any:
    if "TOTAL" in made.attributes.partition(" metadata=")[0] and jax.dtypes.issubdtype(x.dtype, np.inexact):
        raise NotImplementedError("a total order of floating-point numbers is read in comparators of a sort only")
    return getattr(lax, made.text("direction").lower())(x, y)


def _dimensions(kind: Any, made: Instruction) -> Any:
    """The dimensions of a gather or a scatter. Of a scatter, one has another name."""
    operand = "operand" if made.opcode == "gather" else "input"
    return kind(*(made.numbers(name.replace("operand_batching", f"{operand}_batching")) for name in kind._fields))


def _gather(made: Instruction, x: Any, indices: Any) -> Any:
    numbers, sizes = _dimensions(lax.GatherDimensionNumbers, made), made.numbers("slice_sizes")
    return lax.gather(x, _vectors_last(made, indices), numbers, sizes, mode=lax.GatherScatterMode.CLIP)


def _vectors_last(made: Instruction, indices: Any) -> Any:
    """The indices of a gather or a scatter; JAX has the components of an index in the last dimension."""
    (dim,) = made.numbers("index_vector_dim")
    indices = lax.expand_dims(indices, (dim,)) if dim == indices.ndim else indices
    return jax.numpy.moveaxis(indices, dim, -1)


def _topk(made: Instruction, x: Any) -> Any:
    if made.text("largest") == "false":
        raise NotImplementedError("it takes the least elements")
    return tuple(lax.top_k(x, *made.numbers("k")))


def _custom_call(made: Instruction, x: Any, *_: Any) -> Any:
    target = made.text("custom_call_target")
    if target == "Sharding":
        return x
    if re.fullmatch("lapack_[sdcz]potrf_ffi", target) and f"uplo = {ord('L')} " in made.attributes:
        # The second result is 0: a matrix that is not positive definite has NaNs in the first.
        return lax.linalg.cholesky(x, symmetrize_input=False), np.zeros(_types_of(made)[1].shape, np.int32)
    raise NotImplementedError


def _constant(made: Instruction) -> np.ndarray[Any, Any]:
    (kind,), words = _types_of(made), re.findall(r"\([^)]*\)|[^\s{},()]+", made.literal)
    readers: dict[str, Callable[[str], Any]] = {
        "b": lambda word: word in ("true", "1"), "c": lambda word: complex(*map(float, word[1:-1].split(","))),
        "i": int, "u": int,
    }  # fmt: skip
    return np.array([*map(readers.get(kind.dtype.kind, float), words)], kind.dtype).reshape(kind.shape)


_INSTRUCTIONS: Mapping[str, Callable[..., Any]] = {
    **{opcode: _elementwise(name or opcode.replace("-", "_"))
       for opcode, _, name in (entry.partition("=") for entry in _ELEMENTWISE.split())},
    "constant": _constant,
    "copy": lambda m, x: x,
    "tuple": lambda m, *x: x,
    "get-tuple-element": lambda m, x: x[m.number],
    "reshape": lambda m, x: lax.reshape(x, _types_of(m)[0].shape),
    "transpose": lambda m, x: lax.transpose(x, m.numbers("dimensions")),
    "broadcast": lambda m, x: lax.broadcast_in_dim(x, _types_of(m)[0].shape, m.numbers("dimensions")),
    "iota": lambda m: lax.broadcasted_iota(_types_of(m)[0].dtype, _types_of(m)[0].shape, *m.numbers("iota_dimension")),
    "reverse": lambda m, x: lax.rev(x, m.numbers("dimensions")),
    "concatenate": lambda m, *x: lax.concatenate(x, *m.numbers("dimensions")),
    "slice": lambda m, x: x[tuple(slice(*n) for n in _numbers(re.findall(r"[\d:]+", m.text("slice")), ":"))],
    "pad": lambda m, x, value: lax.pad(x, value, [(*n, 0)[:3] for n in _numbers(m.text("padding").split("x"), "_")]),
    "dynamic-slice": lambda m, x, *i: lax.dynamic_slice(x, i, _types_of(m)[0].shape, allow_negative_indices=False),
    "dynamic-update-slice": lambda m, x, y, *i: lax.dynamic_update_slice(x, y, i, allow_negative_indices=False),
    "convert": lambda m, x: lax.convert_element_type(x, _types_of(m)[0].dtype),
    "bitcast-convert": lambda m, x: lax.bitcast_convert_type(x, _types_of(m)[0].dtype),
    "round-nearest-even": lambda m, x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round-nearest-afz": lambda m, x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "compare": _compare,
    "dot": _dot,
    "convolution": _convolution,
    "fft": lambda m, x: lax.fft(x, m.text("fft_type"), m.numbers("fft_length")),
    "rng-bit-generator": lambda m, key: tuple(lax.rng_bit_generator(
        key, _types_of(m)[1].shape, _types_of(m)[1].dtype, getattr(lax.RandomAlgorithm, m.text("algorithm").upper()))),
    "gather": _gather,
    "topk": _topk,
    "custom-call": _custom_call,
    "replica-id": lambda m: np.zeros((), np.uint32),
}  # fmt: skip
"""Functions of an instruction and its operands."""
