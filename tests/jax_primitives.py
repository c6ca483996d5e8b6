"""The primitives that the installed JAX defines, and the names of their parameters.

JAX has no list of them. Its tables of rules (lowering, derivatives, batching, dead code) are keyed by primitives, the
rest is found among the objects of its modules. What a primitive takes are the keyword-only parameters of its rules, the
optional ones that they read, and what equations of small programs show.
"""

import ast
import functools
import gc
import importlib
import inspect
import textwrap
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax.extend.core import primitives as public_primitives

from gshard.core.jax_adapter import closed, sub_jaxprs

# Modules that define primitives and are imported only where they are used.
_MODULES = """
jax.experimental.buffer_callback jax.experimental.checkify jax.experimental.compute_on jax.experimental.control_deps
jax.experimental.custom_partitioning jax.experimental.fused jax.experimental.hijax jax.experimental.layout
jax.experimental.multihost_utils jax.experimental.overlap jax.experimental.pallas jax.experimental.rnn
jax.experimental.scheduling_groups jax.experimental.shard_alike jax.experimental.sparse jax.experimental.xla_metadata
jax.ffi
""".split()

# Parameters of functions that build a rule, or an operation of MLIR, and of no equation.
_OF_RULES = frozenset(
    """
    allow_extended_dtype backend ctx enable_eigvec_derivs expand_complex_convolutions fallback ip is_async loc max_bits
    platform primitive require_same res_aval results swap_ans
    """.split()
)

# JAX's rules for whole families read these of every member, also of those that never have them.
_OF_FAMILIES = frozenset("input_layouts out_dtype out_sharding output_layouts".split())

# They are imported with kernels for TPU and GPU.
_OF_KERNELS = (
    "jax._src.pallas.mosaic", "jax._src.pallas.triton", "jax._src.pallas.fuser", "jax._src.pallas.einshape",
    "jax.experimental.mosaic",
)  # fmt: skip


def primitives():
    """Every primitive, in the order of names."""
    for module in _MODULES:
        try:
            importlib.import_module(module)
        except ImportError:  # this version has no such module
            continue
    found = {v for v in vars(public_primitives).values() if isinstance(v, core.Primitive)}
    for table in _tables():
        found.update(p for p in table if isinstance(p, core.Primitive))
    gc.unfreeze()  # what conftest.py froze is not listed
    found.update(o for o in gc.get_objects() if isinstance(o, core.Primitive))
    # Newer JAX wraps a primitive while it transposes it; no program has such an equation.
    found = {getattr(p, "prim", p) if type(p).__name__ == "VJPNode" else p for p in found}
    return sorted((p for p in found if _is_of_jax(p)), key=lambda p: p.name)


def parameters():
    """The names of the parameters of each primitive, by its name."""
    found = {}
    for p in primitives():
        found.setdefault(p.name, set()).update(keywords_of(p))
    for e in _equations(*_programs()):
        if e.primitive.name in found:
            found[e.primitive.name].update(e.params)
    return found


def keywords_of(p):
    """The keyword-only parameters of a primitive's rules."""
    rules = [p.abstract_eval, *(table[p] for table in _tables() if p in table)]
    found = set()
    for rule in rules:
        for f, bound in _functions(rule, frozenset(), set()):
            names = inspect.signature(f).parameters.values()
            found |= {a.name for a in names if a.kind is a.KEYWORD_ONLY} - bound
            for a in names:
                found |= _read_from(f, a.name) - bound - _OF_FAMILIES if a.kind is a.VAR_KEYWORD else set()
    return found - _OF_RULES - ({"name"} if p.name == "dot_general" else set())


def _read_from(f, name):
    """The optional keywords that a function reads from its ``**name``: as ``name["key"]`` or ``name.get("key")``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(f)))
    except (OSError, SyntaxError):  # a lambda in the middle of an expression
        return set()
    items = [(n.value, [n.slice]) for n in ast.walk(tree) if isinstance(n, ast.Subscript)]
    items += [
        (n.func.value, n.args[:1])
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
    keys = [key for read, keys in items if isinstance(read, ast.Name) and read.id == name for key in keys]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _tables():
    return [
        mlir._lowerings,
        *mlir._platform_specific_lowerings.values(),
        ad.primitive_jvps,
        ad.primitive_linearizations,
        ad.primitive_transposes,
        batching.fancy_primitive_batchers,
        partial_eval.dce_rules,
        partial_eval.partial_eval_jaxpr_custom_rules,
    ]


def _is_of_jax(p):
    """Whether JAX made a primitive, and not this library, another one or a test."""
    rules = [p.abstract_eval, p.impl, *(table[p] for table in _tables() if p in table)]
    modules = {f.__module__ or "" for rule in rules for f, _ in _functions(rule, frozenset(), set())}
    ours = bool(modules) and all(m.startswith("jax") and not m.startswith("jax_") for m in modules)
    return ours and not any(map(is_of_kernels, modules))


def is_of_kernels(module):
    """Whether what a module defines is used inside kernels for one kind of device, which are parameters as wholes."""
    return module.startswith(_OF_KERNELS)


def _functions(f, bound, seen):
    """The functions of JAX's that a rule is made of, each with the keywords that are given already."""
    if id(f) in seen:
        return
    seen.add(id(f))
    if isinstance(f, functools.partial):
        for g in (f.func, *f.args, *f.keywords.values()):
            yield from _functions(g, bound | frozenset(f.keywords), seen)
    elif isinstance(f, types.FunctionType):
        if not (f.__module__ or "").startswith("jaxlib.mlir"):
            yield f, bound
            for cell in f.__closure__ or ():
                if cell != types.CellType():
                    yield from _functions(cell.cell_contents, bound, seen)
    elif isinstance(f, (tuple, list)):
        for g in f:
            yield from _functions(g, bound, seen)
    elif isinstance(f, types.MethodType):
        yield from _functions(f.__func__, bound, seen)
    else:
        inner = getattr(f, "rule", getattr(f, "__wrapped__", None))
        if inner is not None:
            yield from _functions(inner, bound, seen)


def _programs():
    """Programs with primitives whose rules take their parameters as they come."""
    x = jnp.arange(8.0).reshape(4, 2)

    @jax.custom_jvp
    def with_jvp(x):
        return jnp.sin(x)

    @jax.custom_vjp
    def with_vjp(x):
        return jnp.sin(x)

    @jax.custom_batching.custom_vmap
    def with_vmap(x):
        return jnp.sin(x)

    with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))
    with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g * x,))
    with_vmap.def_vmap(lambda size, batched, x: (with_vmap(x), batched[0]))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("d")

    def calls(x):
        y = jax.jit(jnp.sin)(x) + jax.checkpoint(jnp.sin)(x) + with_jvp(x) + with_vjp(x) + with_vmap(x)
        y = lax.scan(lambda c, _: (jnp.sin(c), None), y, None, length=2)[0]
        y = lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, y)
        y = lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y)
        y = lax.composite(jnp.sin, "some.name")(y)
        y = jax.shard_map(lambda y: lax.psum(y, "d"), mesh=mesh, in_specs=spec, out_specs=jax.P())(y)
        y = lax.with_sharding_constraint(y, jax.NamedSharding(mesh, spec))
        y = jax.device_put(y, jax.NamedSharding(mesh, spec))
        jax.debug.print("{}", y)
        jax.debug.callback(lambda y: None, y)
        y = jax.pure_callback(lambda y: y, y, y)
        y = jax.experimental.io_callback(lambda y: y, y, y)
        y = jax.ffi.ffi_call("target", y)(y)
        return lax.custom_linear_solve(lambda v: 2 * v, y, lambda _, b: b / 2, symmetric=True)

    def arrays(x):
        y = lax.dot_general(x, x.T, (((1,), (0,)), ((), ()))) + x[jnp.array([0, 1])].sum() + x.reshape(8).sum()
        y = y + lax.conv_general_dilated(x[None], x[None], (1,), "SAME").sum() + lax.top_k(x, 1)[0].sum()
        y = y + lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME").sum() + jnp.sort(x).sum()
        y = y + jax.random.normal(jax.random.key(0), (4, 4)) + jnp.cumsum(x).sum() + jnp.exp(x).sum()
        return y.at[0].add(1.0).at[1].set(2.0)

    return [jax.make_jaxpr(f)(x) for f in (calls, jax.grad(lambda x: with_vjp(x).sum()), arrays)]


def _equations(*jaxprs):
    for jaxpr in jaxprs:
        for e in closed(jaxpr)[0].eqns:
            yield e
            yield from _equations(*sub_jaxprs(e.params))
