"""Adapts gshard to private names of JAX: source lines, meshes, jaxprs, types and primitives.

Only this module and ``jax_adapter_*`` use private names of JAX. They hide the differences between the supported
versions, and read what JAX does not make public, such as the user's source line.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.lax.lax import _convert_element_type
from jax._src.random import prng as _prng
from jax.extend import core as _extend_core
from jax.extend import source_info_util as _public_source_info
from jax.interpreters import partial_eval
from jax.lax import all_gather_p as all_gather_p
from jax.lax import all_to_all_p as all_to_all_p
from jax.lax import optimization_barrier_p as optimization_barrier_p
from jax.lax import ppermute_p as ppermute_p
from jax.lax import ragged_all_to_all_p as ragged_all_to_all_p

from gshard.core.memory_kinds import shape_of_type
from gshard.core.planning_tables import tabulated

# Source lines skip frames of the partitioner. Frames of ``gshard.moe`` count as the user's: it uses public names only.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for _folder in sorted(entry.name for entry in os.scandir(_PACKAGE) if entry.is_dir() and entry.name != "moe"):
    _public_source_info.register_exclusion(os.path.join(_PACKAGE, _folder))

_FOLDERS = tuple(os.path.join(os.path.abspath(folder), "") for folder in (os.path.dirname(jax.__file__), _PACKAGE))
_LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\](chex|einops|equinox|flax|haiku|jaxtyping|optax|penzai)[/\\]")

Frame = tuple[str, int, str]
"""A frame of a traceback: the path of the file, the line, and the function."""

# JAX refuses to choose the sharding of a result, on a mesh with axes of type Explicit.
ShardingTypeError = _core.ShardingTypeError


def is_of_library(path: str) -> bool:
    """Whether a source file belongs to an installed library of layers or optimizers.

    A layer of Flax is one line of Flax for all layers of a model; the user's line that calls it tells them apart.

    >>> is_of_library("/env/site-packages/flax/linen/linear.py"), is_of_library("/elsewhere/flax/train.py")
    (True, False)
    """
    return _LIBRARIES.search(path) is not None


def is_of_jax_or_gshard(path: str) -> bool:
    """Whether a source file belongs to JAX or gshard, and not to a package whose name begins like theirs.

    >>> import jax
    >>> is_of_jax_or_gshard(jax.__file__), is_of_jax_or_gshard("/env/site-packages/jaxtyping/_array_types.py")
    (True, False)
    >>> is_of_jax_or_gshard(jax.__file__.replace("__init__", "_models/net").replace("jax/_models", "jax_models"))
    False
    """
    return path.startswith(_FOLDERS)


@tabulated(64)
def _user_frames(traceback: Any) -> list[Any]:
    """The frames outside of JAX, gshard and the frameworks, innermost first; else the innermost of a framework."""
    frames = list(_source_info_util.user_frames(traceback))
    return [f for f in frames if not is_of_library(f.file_name)] or frames[:1]


def _user_frame(traceback: Any) -> Any:
    return next(iter(_user_frames(traceback)), None)


def user_frames(source_info: Any) -> tuple[Frame, ...]:
    """The user's frames of an equation, innermost first; none if JAX kept none."""
    frames = [] if source_info is None else _user_frames(source_info.traceback)
    return tuple((f.file_name, f.start_line, f.function_name) for f in frames)


def user_line(source_info: Any = None) -> str:
    """The user's ``file:line (function)`` of an equation, or of the current call."""
    info = source_info if source_info is not None else _public_source_info.current()
    frame = _user_frame(info.traceback)
    if frame is None:  # JAX's traceback of a call inside of jax.pmap begins at the mapped function
        return "" if source_info is not None else _line_of_stack()
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line} ({frame.function_name})"


def _line_of_stack() -> str:
    """The innermost frame of the Python stack outside of JAX, gshard and the frameworks."""
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if os.path.isfile(name) and not is_of_jax_or_gshard(name) and not is_of_library(name):
            return f"{os.path.basename(name)}:{line} ({frame.f_code.co_qualname})"
    return ""


def user_place(source_info: Any) -> tuple[str, int] | None:
    """The user's file and line of an equation; None if JAX kept no line."""
    frame = None if source_info is None else _user_frame(source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line)


class Expression(NamedTuple):
    """The place of an expression of the user's in a source file; columns count bytes from 0."""

    file: str  # the path of the file
    line: int
    column: int
    end_line: int
    end_column: int


def user_expressions(source_info: Any) -> tuple[Expression, ...]:
    """The user's expressions that perform an equation: the innermost one, and the calls around it, outwards."""
    frames = [] if source_info is None else _user_frames(source_info.traceback)
    own = (f for f in frames if not is_of_library(f.file_name))
    return tuple(Expression(f.file_name, f.start_line, f.start_column, f.end_line, f.end_column) for f in own)


def in_scopes_of(source_info: Any, call: Any) -> Any:
    """The source information of an equation in the body of a call, with the named scopes of the call in front."""
    call_scopes = call.name_stack.stack
    if not call_scopes or source_info.name_stack.stack[: len(call_scopes)] == call_scopes:
        return source_info
    return source_info.replace(name_stack=call.name_stack + source_info.name_stack)


def is_transposed(source_info: Any) -> bool:
    """Whether an equation belongs to the backward half of a gradient, for which the user wrote no line."""
    return "transpose(" in str(getattr(source_info, "name_stack", ""))


def is_backward(source_info: Any, outer: bool) -> bool:
    """Whether an equation is transposed, in a body whose equation is so or not; what remat computes again is not."""
    stack = str(source_info.name_stack)
    return (outer or "transpose(" in stack) and "rematted_computation" not in stack


def is_of_vmap(source_info: Any) -> bool:
    """Whether ``jax.vmap`` made an equation: its arrays have a dimension that the user's do not have."""
    return "vmap(" in str(source_info.name_stack)


_OF_JAX = {"rematted_computation"}  # scopes that JAX itself opens


def scopes_of(source_info: Any) -> tuple[str, ...]:
    """The named scopes of an equation, outermost first: modules of Flax Linen and Haiku, and ``jax.named_scope``.

    The result omits transformations between the scopes, such as ``transpose(jvp(...))``. One scope may name several
    modules: ``decoder/layers``, or ``mlp/~/linear_0`` in Haiku.
    """
    stack = getattr(getattr(source_info, "name_stack", None), "stack", ())
    scopes = (str(part.name) for part in stack if isinstance(part, _source_info_util.Scope))
    return tuple(word for scope in scopes if scope not in _OF_JAX for word in scope.split("/") if word.strip("~"))


class as_if_at:
    """A context manager: equations traced inside get the source line and the named scopes of another equation."""

    __slots__ = ("_alone", "_context", "_source_info")

    def __init__(self, source_info: Any, *, alone: bool = False):
        self._source_info, self._alone = source_info, alone

    def __enter__(self) -> None:
        source, names = self._source_info, _public_source_info.current_name_stack()
        if source is not None:
            names = source.name_stack if self._alone else names + source.name_stack
        self._context = _public_source_info.user_context(getattr(source, "traceback", None), name_stack=names)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)  # with the error, JAX would replace the error's traceback


def mesh_of_context() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh that ``jax.set_mesh``, ``with mesh`` or ``use_abstract_mesh`` has set; None if none is.

    The public ``get_mesh`` raises while a function is traced, and ignores ``with mesh``.
    """
    environment = getattr(getattr(_mesh, "thread_resources", None), "env", None)
    of_with_statement = getattr(environment, "physical_mesh", None)
    candidates = (_mesh.get_concrete_mesh(), of_with_statement, jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in candidates if mesh is not None and not mesh.empty), None)


@contextlib.contextmanager
def no_mesh_set() -> Iterator[None]:
    """Unsets the mesh that the user has set, inside a ``with`` block or a decorated function.

    gshard traces its own functions for arrays without a mesh, or on one device. While a mesh is set, JAX gives every
    new array, including constants, a type over this mesh, and refuses to mix such types with other types.
    """
    concrete = _sharding_impls._internal_use_concrete_mesh(_mesh.empty_concrete_mesh)
    with concrete, jax.sharding.use_abstract_mesh(_mesh.empty_abstract_mesh):
        yield


def put_all(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Places arrays. While a mesh is set, JAX refuses arrays on other devices than its, or on its devices reordered."""
    with no_mesh_set():
        return list(jax.device_put(list(arrays), list(shardings))) if arrays else []


def is_mapped(x: Any) -> bool:
    """Whether an array is a tracer of ``jax.vmap``, which hides a dimension."""
    while hasattr(x, "primal"):  # a derivative taken inside
        x = x.primal
    return isinstance(x, _batching.BatchTracer)


def line_of_exception(error: BaseException) -> str | None:
    """The innermost ``file:line (function)`` of an exception's traceback outside of JAX and gshard, if there is one."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    innermost = next((frame for frame in frames if not is_of_jax_or_gshard(frame.filename)), None)
    return innermost and f"{os.path.basename(innermost.filename)}:{innermost.lineno} ({innermost.name})"


def closed(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """The jaxpr and the constants of a (closed) jaxpr. Newer JAX has one class where 0.10 has two."""
    consts = tuple(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def name_of_function(jaxpr: Any) -> str:
    """The name of the function that a jaxpr was traced from; empty if JAX has not kept it."""
    return str(getattr(closed(jaxpr)[0].debug_info, "func_src_info", "")).partition(" ")[0]


def shapes_of(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes to trace a function with, without shardings."""
    return list(map(shape_of_type, avals))


def without_axes_of_dim(aval: Any, dim: int) -> Any:
    """The type of an array without axes of type Explicit along a dimension."""
    spec: Any = getattr(getattr(aval, "sharding", None), "spec", ())
    if len(spec) <= dim or spec[dim] is None:
        return aval
    entries = [None if d == dim else entry for d, entry in enumerate(spec)]
    return aval.update(sharding=aval.sharding.update(spec=spec.update(partitions=entries)))


def as_weak(x: Any, weak: bool) -> Any:
    """The array with a weak type, or with a type that is not weak. A weak type gives way to the types of others."""
    if jax.typeof(x).weak_type == weak or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return _convert_element_type(x, x.dtype, weak_type=weak)


def relabelled(x: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """An array of the same parts on the same devices, with another sharding: nothing moves. Its weak type is kept."""
    part_on = {shard.device: shard.data for shard in x.addressable_shards}
    # JAX expects the parts of random keys in the order of the sharding's devices.
    parts = [part_on[device] for device in sharding.mesh.devices.flat if device in part_on]
    array = jax.make_array_from_single_device_arrays(x.shape, sharding, parts)
    if not getattr(x, "weak_type", False):  # keys have no such type
        return array
    return type(array)(array.aval.update(weak_type=True), sharding, parts, committed=True)


def of_no_mesh(x: Any) -> Any:
    """A constant of a program with a type without a mesh. JAX refuses types with a mesh inside of ``shard_map``."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    if mesh is None or not mesh.explicit_axes:
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(of_no_mesh(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return as_weak(jax.numpy.asarray(np.asarray(x)), jax.typeof(x).weak_type)


def traced_together(a: Any, b: Any) -> bool:
    """Whether two arrays belong to the same trace, so that one equation may read both."""
    return getattr(a, "_trace", None) is getattr(b, "_trace", None)


def jaxpr_without_dead_code(jaxpr: Any) -> Any:
    """The (closed) jaxpr without equations that no result needs; all its inputs stay."""
    body, consts = closed(jaxpr)
    needed = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)[0]
    return needed if body is jaxpr else _extend_core.ClosedJaxpr(needed, consts)


def is_tree_of_operands(x: Any) -> bool:
    """Whether a parameter is the structure in which newer JAX keeps the operands of a scan. ``==`` compares two."""
    return type(x).__module__ == "jax._src.flattree"


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constant and of carried operands of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def impl_of_keys(aval: Any) -> Any:
    """How random keys of a type are made: what ``jax.random.wrap_key_data`` takes as ``impl``."""
    return aval.dtype._impl


def expand_random_bits(keys_aval: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    """The jaxpr, from keys to bits, of JAX's expansion of ``random_bits`` into simpler primitives."""

    def bits(keys: Any) -> Any:
        data = jax.random.key_data(keys)
        return _prng.random_bits_impl_base(
            impl_of_keys(keys_aval), data, len(keys_aval.shape), bit_width=bit_width, shape=shape
        )

    return jax.make_jaxpr(bits)(jax.ShapeDtypeStruct(keys_aval.shape, keys_aval.dtype))


def expand_high_primitive(params: dict[str, Any], in_avals: Sequence[Any]) -> Any:
    """The jaxpr of an operation that newer JAX keeps as one equation, from the ``expand`` method of its class."""
    primitive = params["_prim"]

    def flat(*arguments: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, arguments))

    return jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in in_avals))


def function_of(primitive: Any) -> Callable[..., Sequence[Any]] | None:
    """The Python function through which JAX lowers a primitive, or runs it if the primitive has no lowering.

    The function returns a list of results. None if the primitive has a lowering that is not a Python function of
    arrays, for all platforms or for the default backend.
    """
    platforms = _xla_bridge.expand_platform_alias(jax.default_backend())
    if any(primitive in _mlir._platform_specific_lowerings[platform] for platform in platforms):
        return None
    lowering = _mlir._lowerings.get(primitive)
    multiple_results = primitive.multiple_results
    if lowering is None:
        function = primitive.impl
    elif getattr(lowering.rule, "__qualname__", "") == "lower_fun.<locals>.f_lowered":
        captured = inspect.getclosurevars(lowering.rule).nonlocals
        function = captured["fun"]
        multiple_results = captured["multiple_results"]
    else:
        return None
    return function if multiple_results else lambda *arrays, **params: [function(*arrays, **params)]


def retyped(x: Any, aval: Any) -> Any:
    """The array with the weak type of ``aval``."""
    x = jax.numpy.asarray(x)
    if (x.shape, x.dtype) != (aval.shape, aval.dtype):
        raise TypeError(f"{x.dtype}{x.shape} is not {aval.dtype}{aval.shape}")
    return as_weak(x, aval.weak_type)


def with_subclasses(cls: Any) -> Iterator[Any]:
    """A class and all classes that derive from it."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from with_subclasses(subclass)


def evaluate(
    body: Any,
    consts: Iterable[Any],
    arguments: Iterable[Any],
    run: Callable[[Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = lambda v: v.val,
) -> list[Any]:
    """Evaluates a jaxpr over values of any kind."""
    env: dict[Any, Any] = dict(zip(body.invars, arguments, strict=True))
    env.update(zip(body.constvars, consts, strict=True))

    def read(v: Any) -> Any:
        return literal(v) if isinstance(v, _extend_core.Literal) else env[v]

    for eqn in body.eqns:
        env.update(zip(eqn.outvars, run(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, body.outvars))


def sub_jaxprs(params: dict[str, Any]) -> tuple[Any, ...]:
    """The jaxprs among an equation's parameters, also in tuples and lists (the branches of a cond)."""
    values: list[Any] = []
    for value in params.values():
        values.extend(value if isinstance(value, (tuple, list)) else (value,))
    return tuple(v for v in values if isinstance(v, (_extend_core.Jaxpr, _extend_core.ClosedJaxpr)))


# Primitives that only run a body once on their operands. The parameter that holds the body differs between versions.
_CALLS = frozenset(
    """jit pjit call core_call closed_call remat remat2 checkpoint composite eval_jaxpr custom_jvp_call custom_vjp_call
    custom_vmap_call linear_call gshard_call compute_on
    xla_metadata_call""".split()
)


def body_of_call(name: str, params: dict[str, Any]) -> Any | None:
    """The body of an equation that only runs this body once on its operands; None for other equations.

    Such equations are jit, closed calls, remat, composites and functions with custom derivatives or a custom vmap.
    Outside of a transformation each of them is equivalent to its body.
    """
    if name not in _CALLS:
        return None
    return next(params[key] for key in ("call_jaxpr", "jaxpr", "fun_jaxpr", "call", "callee") if key in params)


def called_jaxpr(eqn: Any) -> Any | None:
    """The body of an equation that is a call (``body_of_call``); None for other equations."""
    return body_of_call(eqn.primitive.name, eqn.params)


def bodies_as_written(eqn: Any) -> tuple[Any, ...]:
    """The bodies of calls, loops and branches, in which the user may write sharding constraints."""
    is_call = eqn.primitive.name in _CALLS and not eqn.primitive.name.startswith("custom")
    return sub_jaxprs(eqn.params) if is_call or eqn.primitive.name in ("scan", "while", "cond") else ()


def is_accumulation(eqn: Any) -> bool:
    """Whether an equation adds up the cotangents of a value that several equations read."""
    return bool(eqn.primitive.name == "add_any")


def constraint_of(eqn: Any) -> jax.sharding.PartitionSpec | None:
    """The spec of an equation that is a sharding constraint; None for other equations."""
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    return sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else None


def bind(primitive: Any, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Binds a primitive with the parameters of its equation. Returns a list of results."""
    bindable = primitive.get_bind_params(params)
    functions, params = bindable if isinstance(bindable, tuple) else ((), bindable)
    results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]
