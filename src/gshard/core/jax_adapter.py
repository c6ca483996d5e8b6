"""The one module that touches JAX names outside its public interface.

Everything here hides a difference between the JAX versions we support (0.10.2 and newer) or reads
something JAX offers no public door to (the user's source line).
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lax.lax import _convert_element_type
from jax._src.lax.lax import optimization_barrier_p as optimization_barrier_p
from jax._src.lax.parallel import all_gather_p as all_gather_p
from jax._src.lax.parallel import all_to_all_p as all_to_all_p
from jax._src.lax.parallel import ppermute_p as ppermute_p
from jax._src.random import prng as _prng
from jax.extend import core as _extend_core
from jax.extend import source_info_util as _public_source_info

from gshard.core.library_files import is_of_library
from gshard.core.memory_kinds import shape_of_type
from gshard.core.planning_tables import tabulated

# Frames of the partitioner are not the user's; the model library's are, since it is written as users write.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
for _folder in sorted(entry.name for entry in os.scandir(_PACKAGE) if entry.is_dir() and entry.name != "moe"):
    _public_source_info.register_exclusion(os.path.join(_PACKAGE, _folder))


@tabulated(64)
def _user_frame(traceback: Any) -> Any:
    """The innermost frame that is not JAX's, ours or, if there is another one, a framework's."""
    frames = list(_source_info_util.user_frames(traceback))
    return next((f for f in frames if not is_of_library(f.file_name)), frames[0] if frames else None)


def user_line(source_info: Any = None) -> str:
    """The user's ``file:line (function)`` of an equation, or of the call under way.

    Args:
        source_info: an equation's ``source_info``; None means the current call stack.

    Returns:
        text such as ``train.py:41 (loss)``, or an empty string if JAX kept no line.
    """
    info = source_info if source_info is not None else _source_info_util.current()
    frame = _user_frame(info.traceback)
    if frame is None:
        return ""
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line} ({frame.function_name})"


def user_place(source_info: Any) -> tuple[str, int] | None:
    """The user's file and line of an equation, None if JAX kept none."""
    frame = None if source_info is None else _user_frame(source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line)


def in_scopes_of(source_info: Any, call: Any) -> Any:
    """Where an equation of a call's body stands: in the named scopes of the call, and in its own."""
    outer = call.name_stack.stack
    if not outer or source_info.name_stack.stack[: len(outer)] == outer:
        return source_info
    return source_info.replace(name_stack=call.name_stack + source_info.name_stack)


def is_transposed(source_info: Any) -> bool:
    """Whether an equation is of the backward half of a gradient: what the user wrote no line for."""
    return "transpose(" in str(getattr(source_info, "name_stack", ""))


_OF_JAX = {"rematted_computation"}  # scopes that JAX itself opens


def scopes_of(source_info: Any) -> tuple[str, ...]:
    """The named scopes of an equation, outermost first: modules of Flax Linen and Haiku, and ``jax.named_scope``.

    Transformations that stand between them, such as ``transpose(jvp(...))``, are left out. One scope may name several
    modules: ``decoder/layers``, or Haiku's ``mlp/~/linear_0``.
    """
    stack = getattr(getattr(source_info, "name_stack", None), "stack", ())
    scopes = (str(part.name) for part in stack if isinstance(part, _source_info_util.Scope))
    return tuple(word for scope in scopes if scope not in _OF_JAX for word in scope.split("/") if word.strip("~"))


class as_if_at:
    """What is traced inside gets the source line and the named scopes of another equation.

    Args:
        source_info: the equation's.
        alone: whether it gets no other scopes, such as those of an outer ``as_if_at``.
    """

    __slots__ = ("_alone", "_context", "_source_info")

    def __init__(self, source_info: Any, *, alone: bool = False):
        self._source_info, self._alone = source_info, alone

    def __enter__(self) -> None:
        source, names = self._source_info, _source_info_util.current_name_stack()
        if source is not None:
            names = source.name_stack if self._alone else names + source.name_stack
        self._context = _source_info_util.user_context(getattr(source, "traceback", None), name_stack=names)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)  # told of an error, it would rewrite where the error comes from


def mesh_of_context() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh that ``jax.set_mesh``, ``with mesh`` or ``use_abstract_mesh`` has set; None if none is.

    The public ``get_mesh`` refuses to answer while a function is traced, and does not know ``with mesh``.
    """
    environment = getattr(getattr(_mesh, "thread_resources", None), "env", None)
    found = (_mesh.get_concrete_mesh(), getattr(environment, "physical_mesh", None), jax.sharding.get_abstract_mesh())
    return next((m for m in found if m is not None and not m.empty), None)


@contextlib.contextmanager
def no_mesh_set() -> Iterator[None]:
    """No mesh is set inside, whatever mesh the user has set. Also a decorator.

    What gshard traces for itself is about arrays of no mesh, or about those of one device. JAX gives everything that is
    made while a mesh is set a type over that mesh, also constants, and refuses to mix such types with others.
    """
    concrete = _sharding_impls._internal_use_concrete_mesh(_mesh.empty_concrete_mesh)
    with concrete, jax.sharding.use_abstract_mesh(_mesh.empty_abstract_mesh):
        yield


def is_mapped(x: Any) -> bool:
    """Whether ``jax.vmap`` is known to hide a dimension of this array."""
    while hasattr(x, "primal"):  # a derivative taken inside
        x = x.primal
    return isinstance(x, _batching.BatchTracer)


def line_of_exception(error: BaseException) -> str | None:
    """The user's innermost ``file:line (function)`` in an exception's traceback: neither JAX's nor ours."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    jaxs = os.path.dirname(os.path.abspath(jax.__file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((ours, jaxs))]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} ({frames[-1].name})" if frames else None


def closed(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """A (closed) jaxpr as (jaxpr, constants): newer JAX has one class where 0.10 has two."""
    consts = tuple(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def shapes_of(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What to trace a function on that is to see such arrays, on no devices in particular."""
    return list(map(shape_of_type, avals))


def as_traced_here(jaxpr: Any) -> Any:
    """The same (closed) jaxpr, its equations and literals under the mesh of now, not that of when it was traced.

    A jaxpr, and each jaxpr in it, that is closed already is returned unchanged.
    """
    return AsTracedHere(jax.sharding.get_abstract_mesh()).jaxpr(jaxpr)


class AsTracedHere:
    """Puts jaxprs under a mesh; what they share stays shared."""

    def __init__(self, mesh: Any):
        self._mesh, self._bodies, self._contexts = mesh, dict[Any, Any](), dict[Any, Any]()

    def jaxpr(self, jaxpr: Any) -> Any:
        body, _ = closed(jaxpr)
        if body not in self._bodies:
            eqns = list(map(self._equation, body.eqns))
            same = all(map(operator.is_, eqns, body.eqns))
            self._bodies[body] = body if same else body.replace(eqns=eqns)
        made = self._bodies[body]
        return jaxpr if made is body else made if body is jaxpr else jaxpr.replace(jaxpr=made)

    def _equation(self, e: Any) -> Any:
        inputs, context = list(map(self._read, e.invars)), self._context(e.ctx)
        params = {k: self.parameter(v) for k, v in e.params.items()}
        same = context is e.ctx and all(map(operator.is_, inputs, e.invars))
        same = same and all(params[k] is v for k, v in e.params.items())
        return e if same else e.replace(invars=inputs, ctx=context, params=params)

    def _context(self, context: Any) -> Any:
        if context.cur_abstract_mesh == self._mesh:
            return context
        if context not in self._contexts:
            # Through no mesh: from one mesh to another JAX refuses to go if their sizes differ.
            with context.manager, no_mesh_set(), jax.sharding.use_abstract_mesh(self._mesh):
                self._contexts[context] = type(context)()
        return self._contexts[context]

    def parameter(self, value: Any) -> Any:
        """A parameter, or a part of one, with the jaxprs in it under the mesh."""
        if isinstance(value, (_extend_core.Jaxpr, _extend_core.ClosedJaxpr)):
            return self.jaxpr(value)
        if not isinstance(value, (tuple, list)):
            return value
        made = list(map(self.parameter, value))
        if all(map(operator.is_, made, value)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)

    def _read(self, v: Any) -> Any:
        if not isinstance(v, _core.Literal) or not isinstance(v.aval, _core.ShapedArray):
            return v
        if v.aval.sharding.mesh.empty:
            return v
        plain = _core.ShapedArray(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        return _core.Literal(np.asarray(v.val, v.aval.dtype), plain)


_as_written_p = _extend_core.Primitive("as_written")
_as_written_p.multiple_results = True
_as_written_p.def_impl(lambda *arrays, jaxpr: _extend_core.jaxpr_as_fun(jaxpr)(*arrays))
_as_written_p.def_abstract_eval(lambda *avals, jaxpr: [v.aval for v in closed(jaxpr)[0].outvars])


def _lower_as_written(ctx: Any, *arrays: Any, jaxpr: Any) -> Any:
    return _mlir.core_call_lowering(ctx, *arrays, name="as_written", call_jaxpr=jaxpr)


_mlir.register_lowering(_as_written_p, _lower_as_written)


def as_outside(f: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Runs a function on arrays inside ``shard_map`` as it is traced outside, where types know nothing of a mesh.

    For primitives that compare types with those that they were made for. What cannot be traced outside, or has effects,
    is traced where it stands.
    """
    try:
        with no_mesh_set():
            jaxpr = jax.make_jaxpr(f)(*shapes_of([jax.typeof(x) for x in arrays]))
    except Exception:  # it names an axis of a mesh, say; if it is wrong in itself, this raises the error
        return list(f(*arrays))
    return list(f(*arrays)) if jaxpr.effects or jaxpr.consts else _as_written_p.bind(*arrays, jaxpr=jaxpr)


# How many operands a collective sends, where that is not all of them: the offsets and sizes of a ragged one stay.
SENT_OPERANDS = {"ragged_all_to_all": 1}


def as_weak(x: Any, weak: bool) -> Any:
    """An array whose dtype is, or is not, only a habit of Python's: a weak type gives way to that of others."""
    if _core.typeof(x).weak_type == weak or _dtypes.issubdtype(x.dtype, _dtypes.extended):
        return x
    return _convert_element_type(x, x.dtype, weak_type=weak)


def of_no_mesh(x: Any) -> Any:
    """An array that a program holds, its type one of no mesh: JAX refuses others inside of ``shard_map``."""
    mesh = getattr(getattr(_core.typeof(x), "sharding", None), "mesh", None)
    if mesh is None or not mesh.explicit_axes:
        return x
    if _dtypes.issubdtype(x.dtype, _dtypes.extended):
        return jax.random.wrap_key_data(of_no_mesh(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return as_weak(jax.numpy.asarray(np.asarray(x)), _core.typeof(x).weak_type)


def traced_together(a: Any, b: Any) -> bool:
    """Whether two arrays belong to the same trace, so that what needs one may read the other."""
    return getattr(a, "_trace", None) is getattr(b, "_trace", None)


def jaxpr_without_dead_code(jaxpr: Any) -> Any:
    """The jaxpr without equations that no result needs; all its inputs stay."""
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def expand_random_bits(keys_aval: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    """The jaxpr (from keys to bits) of JAX's own way to make random bits out of simpler primitives."""

    def bits(keys: Any) -> Any:
        impl = keys_aval.dtype._impl
        data = jax.random.key_data(keys)
        return _prng.random_bits_impl_base(impl, data, len(keys_aval.shape), bit_width=bit_width, shape=shape)

    return jax.make_jaxpr(bits)(jax.ShapeDtypeStruct(keys_aval.shape, keys_aval.dtype))


def expand_high_primitive(params: dict[str, Any], in_avals: Sequence[Any]) -> Any:
    """The jaxpr of an operation that newer JAX keeps as one equation (its own class says what it means)."""
    primitive = params["_prim"]

    def flat(*arguments: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, arguments))

    return jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in in_avals))


def function_of(primitive: Any) -> Callable[..., Sequence[Any]] | None:
    """The function of arrays that JAX lowers a primitive by, or runs it by where there is no lowering; always a list.

    None for a primitive with a lowering of its own, on every platform or on the one that programs are made for here.
    """
    here = _xla_bridge.expand_platform_alias(jax.default_backend())
    if any(primitive in _mlir._platform_specific_lowerings[platform] for platform in here):
        return None
    entry, several = _mlir._lowerings.get(primitive), primitive.multiple_results
    if entry is None:
        function = primitive.impl
    elif getattr(entry.rule, "__qualname__", "") == "lower_fun.<locals>.f_lowered":
        made_of = inspect.getclosurevars(entry.rule).nonlocals
        function, several = made_of["fun"], made_of["multiple_results"]
    else:
        return None
    return function if several else lambda *arrays, **params: [function(*arrays, **params)]


def retyped(x: Any, aval: Any) -> Any:
    """An array as one whose type is as weak as that of ``aval``.

    Raises:
        TypeError: its shape or dtype is another.
    """
    x = jax.numpy.asarray(x)
    if (x.shape, x.dtype) != (aval.shape, aval.dtype):
        raise TypeError(f"{x.dtype}{x.shape} is not {aval.dtype}{aval.shape}")
    return x if x.aval.weak_type == aval.weak_type else _lax._convert_element_type(x, x.dtype, aval.weak_type)


def sub_jaxprs(params: dict[str, Any]) -> tuple[Any, ...]:
    """The jaxprs among an equation's parameters, and those in tuples and lists there (the branches of a cond)."""
    values = [x for v in params.values() for x in (v if isinstance(v, (tuple, list)) else (v,))]
    return tuple(v for v in values if isinstance(v, (_extend_core.Jaxpr, _extend_core.ClosedJaxpr)))


# Primitives that do nothing but run a body once on their operands. Which parameter holds it differs between versions.
_CALLS = frozenset(
    """jit pjit call core_call closed_call remat remat2 checkpoint composite eval_jaxpr custom_jvp_call custom_vjp_call
    custom_vmap_call linear_call gshard_call compute_on
    xla_metadata_call""".split()
)


def body_of_call(name: str, params: dict[str, Any]) -> Any | None:
    """The body of an equation that does nothing but run it once on its operands, else None.

    These are jit, closed calls, remat, composites and functions with their own derivatives or vmap: outside of a
    transformation each of them means its body.
    """
    if name not in _CALLS:
        return None
    return next(params[key] for key in ("call_jaxpr", "jaxpr", "fun_jaxpr", "call", "callee") if key in params)


def called_jaxpr(eqn: Any) -> Any | None:
    """The body of an equation that is a call (``body_of_call``), else None."""
    return body_of_call(eqn.primitive.name, eqn.params)


def named_axes(eqn: Any) -> frozenset[Any]:
    """The mesh axes over which an equation communicates or asks where it is, those of its bodies included."""
    return frozenset(e.name for e in eqn.effects if isinstance(e, _core.NamedAxisEffect))


def bind(primitive: Any, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Runs one primitive with the parameters that its equation shows; always a list of results."""
    bindable = primitive.get_bind_params(params)
    functions, params = bindable if isinstance(bindable, tuple) else ((), bindable)
    results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]
