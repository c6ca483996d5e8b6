"""HLO instructions: what the instructions of a module are in ``jax.lax``, and their attributes.

``INSTRUCTIONS`` has those that neither contain computations nor depend on devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from gshard.xla.hlo_parser import Computation, Instruction, arrays_of

DTYPES: Mapping[str, Any] = {
    **{f"s{n}": jax.numpy.dtype(f"int{n}") for n in (2, 4, 8, 16, 32, 64)},
    **{f"u{n}": jax.numpy.dtype(f"uint{n}") for n in (2, 4, 8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    **{f"f8{n}": jax.numpy.dtype(f"float8_{n}") for n in "e4m3fn e5m2 e4m3b11fnuz e4m3fnuz e5m2fnuz".split()},
    "bf16": jax.numpy.dtype("bfloat16"), "pred": np.dtype(bool), "c64": np.dtype("c8"), "c128": np.dtype("c16"),
}  # fmt: skip

_ELEMENTWISE = """
    abs acos acosh add and=bitwise_and asin asinh atan atan2 atanh cbrt ceil clamp complex cosh cosine=cos
    count-leading-zeros=clz divide=div erf exponential=exp exponential-minus-one=expm1 floor imag is-finite log
    log-plus-one=log1p logistic maximum=max minimum=min multiply=mul negate=neg not=bitwise_not
    opt-barrier=optimization_barrier or=bitwise_or popcnt=population_count power=pow real remainder=rem rsqrt select
    shift-left shift-right-arithmetic shift-right-logical sign sine=sin sinh sqrt subtract=sub tan tanh xor=bitwise_xor
"""
COPIES = "copy", "domain"
_MARKERS = "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"
_COMPARED = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}
REDUCED: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lax.reduce_sum, lax.add), "multiply": (lax.reduce_prod, lax.mul), "maximum": (lax.reduce_max, lax.max),
    "minimum": (lax.reduce_min, lax.min), "and": (lax.reduce_and, lax.bitwise_and),
    "or": (lax.reduce_or, lax.bitwise_or), "xor": (lax.reduce_xor, lax.bitwise_xor),
}  # fmt: skip
"""Of a computation of one operation: the reduction by it, and the operation."""

SCATTERED = {"add": lax.scatter_add, "multiply": lax.scatter_mul, "maximum": lax.scatter_max,
              "minimum": lax.scatter_min, "subtract": lax.scatter_sub, "": lax.scatter}  # fmt: skip
_ALGORITHMS = {"rng_three_fry": lax.RandomAlgorithm.RNG_THREE_FRY, "rng_philox": lax.RandomAlgorithm.RNG_PHILOX}


def _elementwise(name: str) -> Callable[..., Any]:
    run = getattr(lax, name)
    return lambda m, *x: run(*x)


def kinds_of(made: Instruction) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the results of an instruction."""
    return [(a.shape, DTYPES.get(a.dtype)) for a in arrays_of(made.type)]


def shape_of(made: Instruction) -> tuple[int, ...]:
    """The shape of the first result of an instruction."""
    return kinds_of(made)[0][0]


def _dtype(made: Instruction) -> Any:
    return kinds_of(made)[0][1]


def _ranges(text: str, *, between: str, default: int) -> Any:
    """Starts, ends and steps of a slice (``[0:4:2], [1:3]``) or of a pad (``0_1x2_2_1``)."""
    found = [re.findall(r"-?\d+", part) for part in text.split(between) if part]
    return tuple(zip(*([*map(int, n), default][:3] for n in found), strict=True)) or ((), (), ())


def window_of(made: Instruction) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A window as ``lax.reduce_window`` describes it, and its dimensions that are reversed."""
    parts = dict(part.split("=") for part in made.text("window").split())
    rank = len(parts["size"].split("x")) if parts else 0
    names = {"size": "window_dimensions", "stride": "window_strides", "lhs_dilate": "base_dilation",
             "rhs_dilate": "window_dilation", "rhs_reversal": "reversed"}  # fmt: skip
    found: dict[str, Any] = {
        name: tuple(map(int, parts[key].split("x"))) if key in parts else (int(key != "rhs_reversal"),) * rank
        for key, name in names.items()
    }
    pads = (pad.split("_") for pad in parts["pad"].split("x")) if "pad" in parts else [(0, 0)] * rank
    found["padding"] = tuple((int(low), int(high)) for low, high in pads)
    return found, tuple(i for i, flipped in enumerate(found.pop("reversed")) if flipped)


def _pad(made: Instruction, x: Any, value: Any) -> Any:
    return lax.pad(x, value, list(zip(*_ranges(made.text("padding"), between="x", default=0), strict=True)))


def _dot(made: Instruction, x: Any, y: Any) -> Any:
    lhs, rhs = ([made.numbers(f"{side}_{name}_dims") for name in ("contracting", "batch")] for side in ("lhs", "rhs"))
    return lax.dot_general(x, y, ((lhs[0], rhs[0]), (lhs[1], rhs[1])), _precision(made), _dtype(made))


def _precision(made: Instruction) -> Any:
    return (
        tuple(map(lax.Precision, made.text("operand_precision").split(",")))
        if "operand_prec" in made.attributes
        else None
    )


def _convolution(made: Instruction, x: Any, kernel: Any) -> Any:
    (window, flipped), spatial = window_of(made), "".join(map(str, range(x.ndim - 2)))
    labels = zip(re.split("_|->", made.text("dim_labels")), ("bf", "oi", "bf"), strict=True)
    lhs, rhs, out = (tuple(text.index(c) for c in first + spatial) for text, first in labels)
    kernel = lax.rev(kernel, [rhs[2 + i] for i in flipped]) if flipped else kernel
    (features,), (batches,) = (made.numbers(f"{kind}_group_count") or (1,) for kind in ("feature", "batch"))
    return lax.conv_general_dilated(
        x, kernel, window.get("window_strides", ()), window["padding"], window["base_dilation"],
        window["window_dilation"], lax.ConvDimensionNumbers(lhs, rhs, out), features, batches, _precision(made),
        _dtype(made),
    )  # fmt: skip


def _compare(made: Instruction, x: Any, y: Any) -> Any:
    if "TOTAL" in made.attributes.partition(" metadata=")[0] and jax.dtypes.issubdtype(x.dtype, np.inexact):
        raise NotImplementedError("a total order of floating-point numbers is read in comparators of a sort only")
    return _COMPARED[made.text("direction")](x, y)


def _gather(made: Instruction, x: Any, indices: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(
        *map(made.numbers, ("offset_dims", "collapsed_slice_dims", "start_index_map")),
        *map(made.numbers, ("operand_batching_dims", "start_indices_batching_dims")),
    )
    indices, sizes = vectors_last(made, indices), made.numbers("slice_sizes")
    return lax.gather(x, indices, numbers, sizes, mode=lax.GatherScatterMode.CLIP)


def vectors_last(made: Instruction, indices: Any) -> Any:
    """The indices of a gather or a scatter; JAX has the components of an index in the last dimension."""
    (dim,) = made.numbers("index_vector_dim")
    if dim == indices.ndim:
        return lax.expand_dims(indices, (dim,))
    order = (*(d for d in range(indices.ndim) if d != dim), dim)
    return indices if dim == indices.ndim - 1 else lax.transpose(indices, order)


def _triangular_solve(made: Instruction, a: Any, b: Any) -> Any:
    left, lower, unit = (made.text(name) == "true" for name in ("left_side", "lower", "unit_diagonal"))
    return _solved(a, b, left, lower, made.text("transpose_a")[0], unit)


def _solved(a: Any, b: Any, left: bool, lower: bool, transposed: str, unit: bool) -> Any:
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=transposed in "TCA", conjugate_a=transposed in "CA",
        unit_diagonal=unit,
    )  # fmt: skip


def _custom_call(made: Instruction, *x: Any) -> Any:
    target = made.text("custom_call_target")
    options = {name: chr(int(code)) for name, code in re.findall(r"(\w+) = (\d+) : ui8", made.attributes)}
    if target in _MARKERS:
        return x[0]
    if target == "TopK":
        return tuple(lax.top_k(x[0], shape_of(made)[-1]))
    if re.fullmatch("lapack_[sdcz]potrf_ffi", target) and options["uplo"] == "L":
        # The second result is 0: a matrix that is not positive definite has NaNs in the first.
        return lax.linalg.cholesky(x[0], symmetrize_input=False), np.zeros(kinds_of(made)[1][0], np.int32)
    if re.fullmatch("lapack_[sdcz]trsm_ffi", target):
        side, lower, transposed, unit = (options[name] for name in ("side", "uplo", "trans_x", "diag"))
        return _solved(x[0], x[1], side == "L", lower == "L", transposed, unit == "U")
    raise NotImplementedError


INSTRUCTIONS: Mapping[str, Callable[..., Any]] = {
    **{opcode: _elementwise(name or opcode.replace("-", "_"))
       for opcode, _, name in (entry.partition("=") for entry in _ELEMENTWISE.split())},
    **dict.fromkeys(COPIES, lambda m, x: x),
    "tuple": lambda m, *x: x,
    "get-tuple-element": lambda m, x: x[m.number],
    "reshape": lambda m, x: lax.reshape(x, shape_of(m)),
    "transpose": lambda m, x: lax.transpose(x, m.numbers("dimensions")),
    "broadcast": lambda m, x: lax.broadcast_in_dim(x, shape_of(m), m.numbers("dimensions")),
    "iota": lambda m: lax.broadcasted_iota(_dtype(m), shape_of(m), *m.numbers("iota_dimension")),
    "reverse": lambda m, x: lax.rev(x, m.numbers("dimensions")),
    "concatenate": lambda m, *x: lax.concatenate(x, *m.numbers("dimensions")),
    "slice": lambda m, x: lax.slice(x, *_ranges(m.text("slice"), between=",", default=1)),
    "pad": _pad,
    "dynamic-slice": lambda m, x, *i: lax.dynamic_slice(x, i, shape_of(m), allow_negative_indices=False),
    "dynamic-update-slice": lambda m, x, y, *i: lax.dynamic_update_slice(x, y, i, allow_negative_indices=False),
    "convert": lambda m, x: lax.convert_element_type(x, _dtype(m)),
    "bitcast-convert": lambda m, x: lax.bitcast_convert_type(x, _dtype(m)),
    "reduce-precision": lambda m, x: lax.reduce_precision(x, *m.numbers("exponent_bits"), *m.numbers("mantissa_bits")),
    "round-nearest-even": lambda m, x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round-nearest-afz": lambda m, x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "compare": _compare,
    "dot": _dot,
    "convolution": _convolution,
    "fft": lambda m, x: lax.fft(x, m.text("fft_type"), m.numbers("fft_length")),
    "rng-bit-generator": lambda m, key: tuple(lax.rng_bit_generator(
        key, *kinds_of(m)[1], _ALGORITHMS.get(m.text("algorithm"), lax.RandomAlgorithm.RNG_DEFAULT))),
    "gather": _gather,
    "topk": lambda m, x: tuple(lax.top_k(x, *m.numbers("k"))),
    "cholesky": lambda m, x: lax.linalg.cholesky(x, symmetrize_input=False),
    "triangular-solve": _triangular_solve,
    "custom-call": _custom_call,
    "replica-id": lambda m: np.zeros((), np.uint32),
}  # fmt: skip
"""Instructions that neither contain computations nor depend on devices: functions of themselves and their operands."""


def constant(made: Instruction) -> np.ndarray[Any, Any]:
    """The array of a ``constant``."""
    (shape, dtype), words = kinds_of(made)[0], re.findall(r"\([^)]*\)|[^\s{},()]+(?:\([^)]*\))?", made.literal)
    if dtype.kind == "b":
        numbers: list[Any] = [word in ("true", "1") for word in words]
    elif dtype.kind == "c":
        numbers = [complex(*map(float, word.strip("()").split(","))) for word in words]
    elif dtype.name.startswith(("int", "uint")):
        numbers = [int(word) for word in words]
    else:
        numbers = [float(word.partition("(")[0]) for word in words]  # nan(0x..)
    return np.array(numbers, dtype).reshape(shape)


def is_neutral(operation: str, x: Any) -> bool:
    """Whether a value is a constant that the operation leaves out of a result."""
    if not isinstance(x, np.ndarray):
        return False
    dtype, rises = x.dtype, operation == "minimum"
    if operation in ("add", "or", "xor", "multiply"):
        return bool(x == (operation == "multiply"))
    if dtype.kind == "b" or operation == "and":
        return bool(x == rises if operation != "and" else ~x == 0)
    if jax.dtypes.issubdtype(dtype, np.inexact):
        return bool(x == (np.inf if rises else -np.inf))
    return bool(x == (jax.numpy.iinfo(dtype).max if rises else jax.numpy.iinfo(dtype).min))


def sort_keys(c: Computation, name: str) -> tuple[int, ...]:
    """The operands by which a comparator sorts in rising, lexicographic order; () if it compares otherwise."""
    made = c.instructions[name]
    if made.opcode == "compare":
        sides = [_compared(c, o) for o in made.operands]
        is_rising = made.text("direction") == "LT" and sides in ([n, n + 1] for n in range(0, 99, 2))
        # A total order puts -0 before 0; lax.sort does so with neither.
        bare = any(c.instructions[o].opcode == "parameter" and "f" in c.instructions[o].type for o in made.operands)
        is_total = "TOTAL" in made.attributes.partition(" metadata=")[0]
        return (sides[0] // 2,) if is_rising and not (bare and is_total) else ()
    first, equal, rest = "", "", ""
    if made.opcode == "or" and c.instructions[made.operands[1]].opcode == "and":
        first, (equal, rest) = made.operands[0], c.instructions[made.operands[1]].operands
    elif made.opcode == "select":
        equal, rest, first = made.operands
    if not equal or c.instructions[equal].opcode != "compare":
        return ()
    head, tail, test = sort_keys(c, first), sort_keys(c, rest), c.instructions[equal]
    is_tie = len(head) == 1 and [_compared(c, o) for o in test.operands] == [2 * head[0], 2 * head[0] + 1]
    return head + tail if tail and is_tie and test.text("direction") == "EQ" else ()


def _compared(c: Computation, name: str) -> int:
    """The parameter that a comparator compares, of which it may take all NaNs or both zeros for one; -1 if it is none.

    ``lax.sort`` takes all NaNs, and both zeros, for equal.
    """
    made = c.instructions[name]
    if made.opcode != "select":
        return made.number if made.opcode == "parameter" else -1
    test, value, other = (c.instructions[o] for o in made.operands)
    tested = [c.instructions[o] for o in test.operands]
    inner, zeros = _compared(c, other.name), ("0", "-0")
    is_nan = test.text("direction") == "NE" and value.literal == "nan" and tested[0] == tested[-1]
    is_zero = test.text("direction") == "EQ" and value.literal in zeros and tested[-1].literal in zeros
    is_one = test.opcode == "compare" and (is_nan or is_zero) and _compared(c, tested[0].name) == inner
    return inner if is_one else -1
