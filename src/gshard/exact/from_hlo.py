"""From HLO: what XLA's SPMD partitioner made of a lowered function, as a JAX program.

``partitioned_hlo`` compiles a lowered function and reads the module that XLA's partitioner leaves: the program of one
device, with every collective, before XLA fuses and reorders instructions. ``jaxpr_of`` turns it into a jaxpr of
``jax.lax`` primitives with the arguments and results of the function: one ``shard_map`` over the mesh of the function.
Equations have the source lines of their instructions.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A function as XLA's partitioner leaves it."""

    module: Module  # the program of one device
    mesh: Mesh  # the devices in the order of their partition numbers
    arguments: tuple[Any, ...]  # shapes and dtypes of the whole flat arguments
    kept: tuple[int, ...]  # the numbers of those that the program reads
    in_specs: tuple[PartitionSpec, ...]  # how these are split over the atoms of the mesh
    results: tuple[Any, ...]  # shapes and dtypes of the whole flat results
    out_specs: tuple[PartitionSpec, ...]


def partitioned_hlo(lowered: jax.stages.Lowered) -> Partitioned:
    """Compiles a lowered function, and reads what XLA's partitioner made of it.

    Neither the environment nor files that remain are used, and JAX's persistent compilation cache neither answers nor
    keeps this compilation.

    Raises:
        TraceError: XLA wrote no module, or an argument or a result is split in a way that no mesh axes describe.
    """
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
    kept, results = tuple(sorted(kept_arguments(compiled))), tuple(jax.tree.leaves(lowered.out_info))
    arguments, takes, gives = tuple(jax.tree.leaves(lowered.in_avals)), lowered.in_tree, lowered.out_tree
    given: Any = takes.flatten_up_to(compiled.input_shardings)  # type: ignore[attr-defined]
    made: Any = gives.flatten_up_to(compiled.output_shardings)  # type: ignore[attr-defined]
    given = [given[i] for i in kept]
    meshes = (s.mesh for s in (*given, *made) if isinstance(s, NamedSharding) and s.mesh.size == module.devices)
    mesh = Mesh.of(next(meshes, {"devices": module.devices}))
    in_specs = tuple(_spec(s, arguments[i].shape, mesh) for i, s in zip(kept, given, strict=True))
    out_specs = tuple(_spec(s, x.shape, mesh) for s, x in zip(made, results, strict=True))
    return Partitioned(module, mesh, arguments, kept, in_specs, results, out_specs)


def _spec(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """A sharding as atoms of a mesh."""
    if mesh.size == 1:
        return PartitionSpec()
    found = resolve(mark_of_any_sharding(sharding, shape), mesh, shape, "")
    if found.order != mesh.order or any(n % mesh.count(along) for n, along in zip(shape, found.dims, strict=True)):
        raise TraceError("an array is split in a way that mesh axes do not describe.", got=f"{shape}: {sharding}")
    return PartitionSpec(*(along or None for along in found.dims))


def jaxpr_of(program: Partitioned) -> Any:
    """Translates a partitioned program to a closed jaxpr, from the whole flat arguments to the whole flat results.

    Raises:
        TraceError: an instruction has no counterpart in JAX.
    """
    reader = _Reader(program.module, program.mesh)

    def local(*arrays: Any) -> tuple[Any, ...]:
        found = reader.run(program.module.entry, arrays)
        return found if isinstance(found, tuple) else (found,)

    def whole(*arrays: Any) -> tuple[Any, ...]:
        read = [jax.random.key_data(arrays[i]) if _is_key(arrays[i]) else arrays[i] for i in program.kept]
        run = local
        if program.mesh.size > 1:
            mesh = program.mesh.abstract_jax_mesh
            run = jax.shard_map(
                local, mesh=mesh, in_specs=program.in_specs, out_specs=program.out_specs, check_vma=False
            )
        return tuple(
            jax.random.wrap_key_data(x, impl=impl_of_keys(like)) if _is_key(like) else x
            for x, like in zip(run(*read), program.results, strict=True)
        )

    with no_mesh_set(), jax.enable_x64(True):  # numbers of 64 bits may be inside of a program without such arguments
        return jax.make_jaxpr(whole)(*shapes_of(program.arguments))


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
        lowered = jax.jit(lambda *x: bind(primitive, dict(params), x)).lower(*types)
        return jaxpr_of(partitioned_hlo(lowered))


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
            if [(np.shape(x), x.dtype) for x in jax.tree.leaves(found)] != [
                (t.shape, t.dtype) for t in _types_of(made)
            ]:
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

    def _operation(self, name: str) -> str:
        """The opcode of a computation that is one operation on its two parameters, or is one of these; else empty."""
        computation = self.module.computations[name]
        root = computation.behind(computation.root, ("copy",))
        assert root is not None
        if root.opcode == "parameter":
            return f"parameter {root.number}"
        made = [computation.instructions[o] for o in root.operands]
        numbers = [m.number for m in made if m.opcode == "parameter"]
        return root.opcode if numbers == [0, 1] or (numbers == [1, 0] and root.opcode in _COMBINED) else ""

    def _combining(self, made: Instruction, *x: Any) -> tuple[Any, Any, Callable[..., Any]]:
        """Operands, initial values and the function of a reduction, as ``lax.reduce`` takes them."""
        (name,), n = made.called("to_apply"), len(x) // 2
        if n > 1:
            return x[:n], x[n:], lambda a, b: self.run(name, [*a, *b])
        return *x, _COMBINED.get(self._operation(name)) or (lambda a, b: self.run(name, [a, b]))

    def _reduce(self, made: Instruction, *x: Any) -> Any:
        return lax.reduce(*self._combining(made, *x), made.numbers("dimensions"))

    def _reduce_window(self, made: Instruction, *x: Any) -> Any:
        return lax.reduce_window(*self._combining(made, *x), **_window_of(made)[0])

    def _select_and_scatter(self, made: Instruction, x: Any, source: Any, init: Any) -> Any:
        (selected,), (scattered,), (window, _) = made.called("select"), made.called("scatter"), _window_of(made)
        compared = self.module.computations[selected]
        chosen = {"GE": lax.ge_p, "LE": lax.le_p}[compared.instructions[compared.root].text("direction")]
        if (self._operation(selected), self._operation(scattered)) != ("compare", "add") or np.any(init != 0):
            raise NotImplementedError
        del window["base_dilation"], window["window_dilation"]
        return primitives.select_and_scatter_add_p.bind(source, x, select_prim=chosen, **window)

    def _scatter(self, made: Instruction, x: Any, indices: Any, update: Any) -> Any:
        numbers = lax.ScatterDimensionNumbers(
            *map(made.numbers, ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims")),
            *map(made.numbers, ("input_batching_dims", "scatter_indices_batching_dims")),
        )
        dropped = lax.GatherScatterMode.FILL_OR_DROP
        scatter = _SCATTERED[self._operation(made.called("to_apply")[0])]
        return scatter(x, _vectors_last(made, indices), update, numbers, mode=dropped)

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

    def _on_groups(self, made: Instruction, x: Any, run: Callable[..., Any], *dims: str, **options: Any) -> Any:
        """Runs a collective on groups of devices; ``dims`` are its parameters that are the dimension."""
        groups = groups_of(made, self.module, ordered=True)
        if self.mesh.size == 1:
            return x
        if len({*map(len, groups)}) > 1:
            raise NotImplementedError("groups differ in size")
        options |= {name: made.numbers("dimensions")[0] for name in dims}
        return run(x, axis_name=self.mesh.atoms, axis_index_groups=groups, **options)

    def _all_reduce(self, made: Instruction, x: Any) -> Any:
        operation = self._operation(made.called("to_apply")[0])
        collective = {"add": lax.psum, "maximum": lax.pmax, "minimum": lax.pmin}.get(operation)
        if collective is not None and x.dtype != np.bool_:
            return self._on_groups(made, x, collective)
        gathered = self._on_groups(made, lax.expand_dims(x, (0,)), lax.all_gather, tiled=True)
        return functools.reduce(_COMBINED[operation], gathered)

    def _reduce_scatter(self, made: Instruction, x: Any) -> Any:
        if self._operation(made.called("to_apply")[0]) != "add" or x.dtype == np.bool_:
            raise NotImplementedError
        return self._on_groups(made, x, lax.psum_scatter, "scatter_dimension", tiled=True)

    def _all_gather(self, made: Instruction, x: Any) -> Any:
        return self._on_groups(made, x, lax.all_gather, "axis", tiled=True)

    def _all_to_all(self, made: Instruction, x: Any) -> Any:
        return self._on_groups(made, x, lax.all_to_all, "split_axis", "concat_axis", tiled=True)

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

_SCATTERED = {"parameter 1": lax.scatter, "add": lax.scatter_add, "multiply": lax.scatter_mul,
              "maximum": lax.scatter_max, "minimum": lax.scatter_min}  # fmt: skip


def _elementwise(name: str) -> Callable[..., Any]:
    run = getattr(lax, name)
    return lambda m, *x: run(*x)


def _sorted_by(comparator: Computation, operands: Sequence[Any]) -> int:
    """By how many operands a comparator sorts, if it is one of ``lax.sort``: all NaNs are equal, and both zeros."""

    def printed(name: str) -> str:
        made = comparator.instructions[name]
        inside = ",".join(map(printed, made.operands)) or made.literal
        return f"{made.text('direction') or made.opcode}({inside})"

    def key(number: int) -> str:
        x, dtype = f"parameter({number})", operands[number // 2].dtype
        if not jax.dtypes.issubdtype(dtype, np.floating):
            return x
        return f"select(NE({x},{x}),constant(nan),select(EQ({x},constant(0)),constant(0),{x}))"

    for count in range(len(operands), 0, -1):
        wanted = ""
        for n in reversed(range(count)):
            keys = f"({key(2 * n)},{key(2 * n + 1)})"
            wanted = f"or(LT{keys},and(EQ{keys},{wanted}))" if wanted else f"LT{keys}"
        if wanted == printed(comparator.root):
            return count
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


def _gather(made: Instruction, x: Any, indices: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(
        *map(made.numbers, ("offset_dims", "collapsed_slice_dims", "start_index_map")),
        *map(made.numbers, ("operand_batching_dims", "start_indices_batching_dims")),
    )
    indices, sizes = _vectors_last(made, indices), made.numbers("slice_sizes")
    return lax.gather(x, indices, numbers, sizes, mode=lax.GatherScatterMode.CLIP)


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
