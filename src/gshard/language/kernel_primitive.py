"""The primitive of ``gshard.kernel``, its rule, and the proof that the plain function on shards computes the result."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.comm.shards import Shards
from gshard.core.errors import ArgumentError, GShardError, ShardingError
from gshard.core.jax_adapter import (
    bind,
    called_jaxpr,
    closed,
    evaluate,
    jaxpr_without_dead_code,
    no_mesh_set,
    shapes_of,
    user_line,
)
from gshard.core.mesh import Atoms, Mesh, prime_factors
from gshard.core.rule import PARALLEL, REDUCE, REPLICATE, Dims, Rule, RuleMaker, Split, place, result_sharding
from gshard.core.sharding import Sharding
from gshard.language.batch import same
from gshard.language.call import Call
from gshard.language.kernel_loops import NotProven, Part, Shard, Step, loops_of, on_shards
from gshard.language.ledger import RESULT_SHARDINGS
from gshard.language.mark_primitive import name_p
from gshard.language.per_device import CONSTRAINTS
from gshard.language.registry import rules_version
from gshard.language.traits import traits_of

# Proves that the plain function of a kernel, run on shards, computes the shards of its results.


def runs_on_shards(
    plain: Any,
    local: Any,
    steps: Sequence[Step],
    rule: Rule,
    atoms_of_loop: Callable[[int], Atoms],
    mesh: Mesh,
    split: Split,
) -> bool:
    """Whether a function computes the shards of its results from shards of its arguments."""

    def emitted(*shards: Any) -> list[Any]:
        results = on_shards(plain, [Part(x, {}) for x in shards], steps, Shard(mesh, atoms_of_loop))
        for i, part in enumerate(results):
            if dict(part.unreduced) != dict(result_sharding(rule, i, split).unreduced):
                raise NotProven
        return [part.array for part in results]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed(local)[0].invars]
    try:
        with no_mesh_set():
            first = jax.make_jaxpr(emitted, axis_env=list(mesh.atom_sizes.items()))(*shapes)
    except (NotProven, GShardError):
        return False
    return same(*map(jaxpr_without_dead_code, (first, local)))


# Jaxprs as one list of equations: calls are opened.


def flat(jaxpr: Any) -> Any:
    """A closed jaxpr with the equations of calls in place of them, and without names of dimensions.

    The bodies of scans are flat too, and have no equations that no result needs.
    """
    body, consts = closed(jaxpr)

    def run(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        called = called_jaxpr(eqn)
        if eqn.primitive.name == "gshard_kernel":
            called = eqn.params["kernel"].plain_jaxpr(types_of(v.aval for v in eqn.invars))
        if eqn.primitive is name_p:
            return operands
        if called is None:
            _refuse_shardings(eqn)
            params = {k: None if k in RESULT_SHARDINGS else _as_python(v) for k, v in eqn.params.items()}
            if (normal := traits_of(eqn.primitive.name).normal) is not None:
                params |= normal(params, eqn.outvars[0].aval.shape)
            if eqn.primitive.name == "scan":
                params["jaxpr"] = flat(jaxpr_without_dead_code(params["jaxpr"]))
            return bind(eqn.primitive, params, operands)
        inner, own = closed(called)
        return evaluate(inner, own, operands, run)

    return jax.make_jaxpr(lambda *arrays: evaluate(body, consts, arrays, run))(*shapes_of(jaxpr.in_avals))


def _as_python(value: Any) -> Any:
    """A parameter with Python's integers in place of NumPy's, so that equal parameters have equal types."""
    if isinstance(value, np.integer):
        return int(value)
    return tuple(map(_as_python, value)) if type(value) is tuple else value


def _refuse_shardings(eqn: Any) -> None:
    meshes = [mesh for key in RESULT_SHARDINGS if (mesh := getattr(eqn.params.get(key), "mesh", None)) is not None]
    if eqn.primitive.name in CONSTRAINTS or any(not mesh.empty for mesh in meshes):
        raise ShardingError(
            "the plain function of a kernel cannot say how arrays are sharded.",
            user_line(eqn.source_info),
            eqn.primitive.name,
            "Mark the arguments and results of the kernel instead.",
        )


_log = logging.getLogger("gshard")

Function = Callable[..., Sequence[Any]]
Types = tuple[tuple[tuple[int, ...], Any], ...]  # of arrays: shape and dtype


class Kernel:
    """A function of flat arrays in two implementations. Compared by identity."""

    def __init__(
        self, name: str, fast: Function, plain: Function, platforms: tuple[str, ...] | None = None,
        *, linear: int = 0, cotangents: int = 0, transposed: Kernel | None = None,
    ) -> None:  # fmt: skip
        # name: what messages call it; fast: the implementation that runs; plain: the implementation that says what it
        # computes, in JAX operators; platforms: where the fast one runs, such as ``("tpu",)``; elsewhere the plain one
        # does. None for everywhere
        self.name, self.fast, self.plain, self.platforms = name, fast, plain, platforms
        # linear: the number of last operands that the results are linear in: the tangents of a derivative; cotangents:
        # the number of results of a derivative; transposed: the kernel from the other operands, and cotangents of the
        # results, to cotangents of these last ones
        self.linear, self.cotangents, self.transposed = linear, cotangents, transposed
        self._derived: dict[Any, Any] = {}
        self._plain_jaxprs: dict[Types, Any] = {}
        self._refusals: dict[Types, str] = {}

    def __repr__(self) -> str:
        return f"kernel {self.name}"

    def plain_jaxpr(self, types: Types) -> Any:
        """The plain function traced on arrays of these types, calls opened."""
        if types not in self._plain_jaxprs:
            with no_mesh_set():
                made = flat(jax.make_jaxpr(self.plain)(*_structs(types)))
            if any(isinstance(x, jax.core.Tracer) for x in closed(made)[1]):
                raise ArgumentError(
                    f"the plain function of {self} uses an array from outside, which is being traced.",
                    user_line(),
                    hint="Pass the array as an argument of the kernel.",
                )
            self._plain_jaxprs[types] = made
        return self._plain_jaxprs[types]

    def result_types(self, types: Types) -> Types:
        """Shapes and dtypes of the results."""
        return types_of(v.aval for v in closed(self.plain_jaxpr(types))[0].outvars)

    def refusal(self, types: Types) -> str:
        """Why the fast function cannot run on arrays of these types; empty if it can."""
        if types not in self._refusals:
            self._refusals[types] = self._tried(types)
        return self._refusals[types]

    def _tried(self, types: Types) -> str:
        try:
            with no_mesh_set():
                made = types_of(jax.eval_shape(self.fast, *_structs(types)))
        except Exception as error:  # a block that does not fit, a derivative that does not exist
            return f"{type(error).__name__}: {error}"
        wanted = self.result_types(types)
        return "" if made == wanted else f"it returns {shown(made)}, and the plain function {shown(wanted)}"

    def implementation(self, platforms: Sequence[str], types: Types) -> Function:
        """The function that runs on arrays of these types."""
        if self.platforms is not None and not set(platforms) <= set(self.platforms):
            return self.plain
        if self.refusal(types):
            _log.warning(
                "gshard: the plain function of %s runs, because the fast one fails: %s", self, self._refusals[types]
            )
            return self.plain
        return self.fast

    @functools.cached_property
    def jitted(self) -> Callable[..., Any]:
        """The kernel as a jitted function, for calls that nothing traces."""
        return jax.jit(functools.partial(kernel_p.bind, kernel=self))

    def mapped(self, dims: tuple[int | None, ...]) -> Kernel:
        """The kernel under ``jax.vmap`` over these dimensions of its operands. Results have the new dimension first.

        The last operands of a linear kernel must all be mapped over.
        """

        def made() -> Kernel:
            back = self.transposed
            if back is not None:
                back = back.mapped((*dims[: len(dims) - self.linear], *(0,) * self.cotangents))
            fast, plain = jax.vmap(self.fast, dims), jax.vmap(self.plain, dims)
            linear, cotangents = self.linear, self.cotangents
            return Kernel(self.name, fast, plain, self.platforms, linear=linear, cotangents=cotangents, transposed=back)

        kernel: Kernel = self.once(("mapped", dims), made)
        return kernel

    def tangent(self, at: tuple[int, ...], operands: int, made: tuple[int, ...]) -> Kernel:
        """The derivative of the results ``made`` along tangents of the operands ``at``: (operands, tangents)."""

        def derivative(f: Function) -> Function:
            def along(*arrays: Any) -> Sequence[Any]:
                of_some, some = _restricted(f, arrays[:operands], at, made)
                results, tangents = jax.jvp(of_some, some, arrays[operands:])
                _have_one_shape((*some, *results), (*arrays[operands:], *tangents))
                return tangents

            return along

        def transpose(f: Function) -> Function:
            def back(*arrays: Any) -> Sequence[Any]:
                of_some, some = _restricted(f, arrays[:operands], at, made)
                results, pullback = jax.vjp(of_some, *some)
                cotangents = pullback(tuple(arrays[operands:]))
                _have_one_shape((*some, *results), (*cotangents, *arrays[operands:]))
                return cotangents

            return back

        def both() -> Kernel:
            gradient = Kernel(f"gradient of {self.name}", transpose(self.fast), transpose(self.plain), self.platforms)
            name, functions = f"derivative of {self.name}", (derivative(self.fast), derivative(self.plain))
            return Kernel(name, *functions, self.platforms, linear=len(at), cotangents=len(made), transposed=gradient)

        kernel: Kernel = self.once(("tangent", at, made), both)
        return kernel

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made of the kernel for this key. So programs that are traced again have equal kernels."""
        if key not in self._derived:
            self._derived.setdefault(key, make())
        return self._derived[key]


def _restricted(
    f: Function, operands: Sequence[Any], at: tuple[int, ...], made: tuple[int, ...]
) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...]]:
    """A function as one of some of its operands to some of its results, and these operands."""

    def of_some(*some: Any) -> tuple[Any, ...]:
        every = list(operands)
        for i, x in zip(at, some, strict=True):
            every[i] = x
        results = f(*every)
        return tuple(results[i] for i in made)

    return of_some, tuple(operands[i] for i in at)


def _have_one_shape(some: Sequence[Any], others: Sequence[Any]) -> None:
    """Writes equations that nothing reads and that have arrays in pairs: their dimensions are the same loops.

    A derivative need not read the arrays that it is a derivative of, but it has their dimensions.
    """
    for x, y in zip(some, others, strict=True):
        lax.add(x, y)


def types_of(avals: Any) -> Types:
    """Shapes and dtypes of arrays."""
    return tuple((tuple(x.shape), x.dtype) for x in avals)


def shown(types: Types) -> str:
    """Types as text: ``float32[8,4], int32[]``."""
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in types) or "nothing"


def _structs(types: Types) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]


kernel_p = Primitive("gshard_kernel")
kernel_p.multiple_results = True


@kernel_p.def_impl
def _called(*arrays: Any, kernel: Kernel) -> Any:
    return kernel.jitted(*arrays)


@kernel_p.def_abstract_eval
def _abstract(*avals: Any, kernel: Kernel) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in kernel.result_types(types_of(avals))]


def _lowered(ctx: Any, *operands: Any, kernel: Kernel) -> Any:
    platforms = ctx.module_context.platforms
    function = kernel.implementation(platforms, types_of(ctx.avals_in))
    return mlir.lower_fun(lambda *arrays: list(function(*arrays)), multiple_results=True)(ctx, *operands)


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, kernel: Kernel) -> Any:
    results = kernel_p.bind(*primals, kernel=kernel)
    at = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    made = tuple(i for i, x in enumerate(results) if jax.dtypes.issubdtype(x.dtype, np.inexact))
    along: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if made:
        derivative = kernel.tangent(at, len(primals), made)
        moved = kernel_p.bind(*primals, *(tangents[i] for i in at), kernel=derivative)
        for i, tangent in zip(made, moved, strict=True):
            along[i] = tangent
    return results, along


def _transposed(cotangents: Sequence[Any], *operands: Any, kernel: Kernel) -> list[Any]:
    if kernel.transposed is None:
        raise TypeError(f"{kernel} is not linear in its operands")
    primals = operands[: len(operands) - kernel.linear]
    given = [ad.instantiate_zeros(ct) for ct in cotangents]
    back = kernel_p.bind(*primals, *given, kernel=kernel.transposed)
    unknown = [ad.is_undefined_primal(x) for x in operands[len(primals) :]]
    return [*(None for _ in primals), *(ct if own else None for ct, own in zip(back, unknown, strict=True))]


def _mapped_over(operands: Sequence[Any], dims: Sequence[int | None], *, kernel: Kernel) -> Any:
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    first, arrays = len(operands) - kernel.linear, list(operands)
    for i, d in enumerate(dims):
        if d is not None:
            arrays[i] = jnp.moveaxis(operands[i], d, 0)
        elif i >= first:
            arrays[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
    at = tuple(0 if d is not None or i >= first else None for i, d in enumerate(dims))
    results = kernel_p.bind(*arrays, kernel=kernel.mapped(at))
    return results, [0] * len(results)


mlir.register_lowering(kernel_p, _lowered)
ad.primitive_jvps[kernel_p] = _derivative
ad.primitive_transposes[kernel_p] = _transposed
batching.primitive_batchers[kernel_p] = _mapped_over


# The rule of a kernel: its plain function, as one equation.

_Kinds = Mapping[int, tuple[str, str | None]]  # for each loop its kind as a factor, and a monoid


def kernel_rule(call: Call) -> Rule:
    """The rule of one application of a kernel, and on a mesh the part of it that is proven."""
    kernel: Kernel = call.params["kernel"]
    types: Types = tuple(zip(call.in_shapes, call.in_dtypes, strict=True))
    splits: _KernelSplits = kernel.once(("splits", types, rules_version()), lambda: _KernelSplits(kernel, types))
    return dataclasses.replace(splits.candidate, on_mesh=splits.on_mesh)


class _KernelSplits:
    """How one application of a kernel may be split."""

    def __init__(self, kernel: Kernel, types: Types) -> None:
        self._kernel, self._types, self._plain = kernel, types, kernel.plain_jaxpr(types)
        self._function = function = loops_of(self._plain)
        leaves = (leaf for dims in (*function.arguments, *function.results) for dim in dims for leaf in dim)
        self._factors = {leaf: f for f, leaf in enumerate(dict.fromkeys(leaves))}
        self._kinds = {leaf: self._candidate(leaf) for leaf in self._factors}
        self.candidate = self._rule_of(self._kinds)
        self._proven: dict[tuple[int, ...], bool] = {}
        self._doubled: dict[frozenset[int], _KernelSplits] = {}

    def on_mesh(self, mesh: Mesh) -> Rule:
        """The rule with those loops whole that no atom of a mesh can split."""
        kinds = dict(self._kinds)
        for leaf, f in self._factors.items():
            if kinds[leaf][0] != REPLICATE and not any(self._is_proven(*trial) for trial in self._trials(f, mesh)):
                kinds[leaf] = REPLICATE, None
        return self._rule_of(kinds)

    def _trials(self, f: int, mesh: Mesh) -> Iterator[tuple[Mesh, Split]]:
        """Splits of a factor alone; of one in a product behind others, beside complete splits of those."""
        candidate = self.candidate
        dims = [dim for own in (*candidate.operands, *candidate.results) for dim in own if f in dim]
        majors = {g: candidate.factors[g].size for dim in dims for g in dim[: dim.index(f)]}
        if not majors:
            for atom in mesh.atoms:
                yield mesh, {f: (atom,)}
            return
        fewest = prime_factors(candidate.factors[f].size)[0]
        devices = Mesh.abstract(**{f"loop{g}": size for g, size in {**majors, f: fewest}.items()})
        yield devices, {g: devices.atoms_of[f"loop{g}"] for g in (*majors, f)}

    def _candidate(self, leaf: int) -> tuple[str, str | None]:
        """The kind of a loop as the rules of the equations give it."""
        function, table = self._function, self._function.table
        arrays = [[own for dim in dims for own in dim] for dims in (*function.arguments, *function.results)]
        monoids = table.monoids().get(leaf, set())
        if leaf in table.whole() or len(monoids) > 1 or any(loops.count(leaf) > 1 for loops in arrays):
            return REPLICATE, None
        return (REDUCE, min(monoids)) if monoids else (PARALLEL, None)

    def _rule_of(self, kinds: _Kinds) -> Rule:
        make = RuleMaker()
        for leaf, (kind, monoid) in kinds.items():
            make.factor(self._function.table.sizes[leaf], kind, monoid)
        takes, makes = (
            [[tuple(self._factors[leaf] for leaf in dim) for dim in dims] for dims in arrays]
            for arrays in (self._function.arguments, self._function.results)
        )
        return make.rule(
            takes, makes, local=_local, flops=self._function.flops, products=self._function.products,
            masks_itself=True, allowed=self._allowed,
        )  # fmt: skip

    def _allowed(self, mesh: Mesh, split: Split) -> bool:
        own = {f: atoms for f, atoms in split.items() if atoms}
        if not own:
            return True
        # A fast function that does not run on whole arrays either has no derivative: the plain one runs.
        refusal = self._kernel.refusal
        return self._is_proven(mesh, own) and not (refusal(self._local_types(mesh, own)) and not refusal(self._types))

    def _is_proven(self, mesh: Mesh, split: Split) -> bool:
        key = tuple(mesh.count(split.get(f, ())) for f in range(len(self._factors)))
        if key not in self._proven:
            self._proven[key] = self._proof(mesh, split)
        return self._proven[key]

    def _proof(self, mesh: Mesh, split: Split) -> bool:
        rule, factors, table = self.candidate, self.candidate.factors, self._function.table
        if any(factors[f].kind == REDUCE and factors[f].size % mesh.count(split[f]) for f in split):
            return False  # what stands in the padding would be combined

        def atoms_of_loop(loop: int) -> Atoms:
            return tuple(a for leaf in table.leaves(loop) for a in split.get(self._factors.get(leaf, -1), ()))

        try:
            on_shards = self._kernel.plain_jaxpr(self._local_types(mesh, split))
        except Exception:  # the plain function refuses arrays of this size
            return False
        if runs_on_shards(self._plain, on_shards, self._function.steps, rule, atoms_of_loop, mesh, split):
            return True
        single = frozenset(f for f, atoms in split.items() if factors[f].size == mesh.count(atoms))
        return bool(single) and self._makes_shards(on_shards, mesh, split) and self._proven_of_two(single, mesh, split)

    def _makes_shards(self, on_shards: Any, mesh: Mesh, split: Split) -> bool:
        made = [shape for shape, _ in types_of(v.aval for v in closed(on_shards)[0].outvars)]
        whole = [shape for shape, _ in self._kernel.result_types(self._types)]
        return made == [
            _local_shape(dims, n, mesh, split) for dims, n in zip(self.candidate.results, whole, strict=True)
        ]

    def _proven_of_two(self, single: frozenset[int], mesh: Mesh, split: Split) -> bool:
        """The proof for loops of twice the size.

        Where a shard has one element along a loop, JAX writes another program: a sum over it is a reshape. So the
        programs are compared where shards have two.
        """
        rule = self.candidate
        if single not in self._doubled:
            types = tuple(
                (tuple(n * 2 ** len(single & set(dim)) for n, dim in zip(shape, dims, strict=True)), dtype)
                for (shape, dtype), dims in zip(self._types, rule.operands, strict=True)
            )
            try:
                self._doubled[single] = _KernelSplits(self._kernel, types)
            except Exception:  # the plain function refuses arrays of this size
                return False
        twice = self._doubled[single]
        alike = (twice.candidate.operands, twice.candidate.results) == (rule.operands, rule.results)
        return alike and twice._is_proven(mesh, split)

    def _local_types(self, mesh: Mesh, split: Split) -> Types:
        pairs = zip(self._types, self.candidate.operands, strict=True)
        return tuple((_local_shape(dims, shape, mesh, split), dtype) for (shape, dtype), dims in pairs)


def _local_shape(dims: Dims, shape: tuple[int, ...], mesh: Mesh, split: Split) -> tuple[int, ...]:
    return Sharding(place(dims, split)).local_shape(mesh, shape)


def _local(shards: Shards, *arrays: Any) -> list[Any]:
    """Runs the kernel on shards. Padding is zero: an index in it must not point outside of an array."""
    are_keys = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays]
    return shards.bind(*(x if are_keys[i] else shards.filled(x, i) for i, x in enumerate(arrays)))
