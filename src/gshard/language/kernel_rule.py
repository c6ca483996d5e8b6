"""The rule of a kernel: its plain function, as one equation.

The loops of the plain function (``language.kernel_loops``) are the factors. The rules of its equations give a candidate
for the kind of each factor. A proof decides (``language.kernel_proof``): first for each loop alone, so that propagation
does not follow loops that cannot be split, and then for each split that planning considers. The fast function must also
accept arrays of a shard's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gshard.comm.shards import Shards, mask
from gshard.core.jax_adapter import closed
from gshard.core.mesh import Atoms, Mesh, prime_factors
from gshard.core.rule import PARALLEL, REDUCE, REPLICATE, Dims, Rule, RuleMaker
from gshard.core.sharding import Sharding
from gshard.core.split import Split, place
from gshard.language.call import Call
from gshard.language.kernel_loops import loops_of
from gshard.language.kernel_primitive import Kernel, Types, types_of
from gshard.language.kernel_proof import runs_on_shards
from gshard.language.registry import rules_version

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
    return shards.bind(*(_filled(shards, i, x) for i, x in enumerate(arrays)))


def _filled(shards: Shards, i: int, x: Any) -> Any:
    shape = shards.equation.inputs[i].shape
    for d, (dim, n) in enumerate(zip(shards.rule.operands[i], shape, strict=True)):
        atoms = tuple(a for f in dim for a in shards.atoms(f))
        if n % shards.mesh.count(atoms) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = mask(x, d, n, atoms, jnp.zeros((), x.dtype))
    return x
