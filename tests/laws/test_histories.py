"""The law: whatever was called before, each call is right.

A history is a random sequence of all that a program may do with jitted functions: call them with arguments that lie
anywhere, call them again, differentiate, map and nest them, compile ahead, explain and search, forget what is cached,
replace rules, change meshes. After each call: the results are those of ``jax.jit`` on one device, to the bit; they are
sharded as said; what is not donated is unchanged.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import allowed_to_refuse, called, said_by, unpartitioned
from placed import PLACES, mesh_of
from small_programs import PROGRAMS, RULES, named, numbers, register

# JAX says so of a donated argument that is cut otherwise than every result of its type.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

SHAPES = (8, 8), (13, 11), (16, 8)
MESHES = {
    "2x4": {"a": 2, "b": 4}, "4x2": {"b": 4, "a": 2}, "8": {"d": 8}, "2x2x2": {"a": 2, "b": 2, "c": 2},
    "explicit": {"a": 2, "b": 4, "explicit": True}, "reversed": {"a": 2, "b": 4, "order": range(7, -1, -1)},
}  # fmt: skip
FIRST_AXIS = {name: next(iter(axes)) for name, axes in MESHES.items()}


@dataclasses.dataclass
class Known:
    """One function of a history: what was jitted, how it is called, and what it must give."""

    program: str
    mesh: str
    option: str
    jitted: Any
    call: Callable[..., Any]
    last: tuple[Any, ...] | None = None
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def small(self):
        return PROGRAMS[self.program]

    @property
    def donated(self):
        return (0,) if self.option == "donated" else ()

    @property
    def under(self):
        return self.on if self.option == "set" else None

    @property
    def on(self):
        return mesh_of(**MESHES[self.mesh])

    def __repr__(self):
        return f"{self.program} on {self.mesh}, {self.option}"


def options_of(option, mesh, arguments, function):
    """What ``gshard.jit`` is given besides the function and the mesh."""
    axis, on = FIRST_AXIS[mesh], mesh_of(**MESHES[mesh])
    found = {
        "plain": {}, "in": {"in_shardings": P(None, axis)}, "out": {"out_shardings": P()},
        "in and out": {"in_shardings": P(axis), "out_shardings": P()},
        "layout": {"layout": gshard.Layout(batch=axis)},
        "donated": {"donate_argnums": 0}, "limited": {"memory_limit": "64KiB"},
        "search": {"search": 0.1, "machine": "h100:1x8"},
        "machine": {"machine": "h100:1x8", "collective_matmul": True}, "unused": {"keep_unused": True},
    }  # fmt: skip
    if option == "plan":
        shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), arguments)
        return {"plan": gshard.search(function, *shapes, mesh=on, machine="h100:1x8", budget_seconds=0.1).plan}
    return found[option]


OPTIONS = (
    "plain", "plain", "in", "out", "in and out", "layout", "donated", "limited", "search", "machine", "plan",
    "unused",
)  # fmt: skip
ways = st.sampled_from(tuple(PLACES))
# JAX transforms only its own arrays, and those of Explicit meshes only under their mesh.
arrays = st.sampled_from([way for way in PLACES if "explicit" not in way])
programs = st.sampled_from(tuple(PROGRAMS))
meshes = st.sampled_from(tuple(MESHES))
indices = st.integers(0, 99)
shapes = st.sampled_from(SHAPES)
dtypes = st.sampled_from([np.int32, np.int32, np.float32])


class Histories(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.known: list[Known] = []
        self.results: list[Any] = []  # of earlier calls, in int32

    def one(self, i, without=()):
        fitting = [k for k in self.known if k.option not in without]
        return fitting[i % len(fitting)] if fitting else None

    def placed(self, k, both, shape, dtype, seed):
        x, y = numbers(shape, seed % 4, dtype), numbers(shape, seed % 4 + 4, dtype)
        return k.small.arguments(*(PLACES[way](v, k.on) for way, v in zip(both, (x, y), strict=True))), (x, y)

    def check(self, k, arguments, times, where):
        """Calls a function so many times with the same arguments; donated ones are copied for each."""
        whole = jax.tree.map(np.array, jax.tree.leaves(arguments))
        tree = jax.tree.structure(arguments)
        want = unpartitioned(k.small.function, jax.tree.unflatten(tree, whole))
        for i in range(times):
            given = arguments
            if k.donated:
                given = jax.tree.map(lambda v: v.copy() if isinstance(v, jax.Array) else v, arguments)
            said = None if isinstance(k.call, gshard.stages.Compiled) else said_by(k.jitted, given)
            with allowed_to_refuse(k.small.function, given, k.under):
                got = called(k.call, given, want, donated=k.donated, said=said, where=f"{k!r}, {where}, call {i}")
                kept = [x for x in jax.tree.leaves(got) if x.dtype == np.int32 and x.ndim == 2]
                self.results = kept[:2] or self.results
        k.last = arguments

    # What makes functions.

    @initialize(program=programs)
    def begin(self, program):
        register(0)
        self.jit(program, "2x4", "plain", (8, 8), np.int32)

    @rule(program=programs, mesh=meshes, option=st.sampled_from(OPTIONS), shape=shapes, dtype=dtypes)
    def jit(self, program, mesh, option, shape, dtype):
        small = PROGRAMS[program]
        arguments = small.arguments(numbers(shape, 0, dtype), numbers(shape, 1, dtype))
        options = options_of(option, mesh, arguments, small.function)
        function = named(small.function) if option == "layout" else small.function
        made = gshard.jit(function, mesh=mesh_of(**MESHES[mesh]), **options)
        self.known.append(Known(program, mesh, option, made, made))
        if option == "plan":
            self.known[-1].compiled[None] = shape, dtype

    @rule(i=indices, mesh=meshes)
    def on_another_mesh(self, i, mesh):
        if k := self.one(i, ("in", "in and out", "layout", "plan", "set")):
            made = k.jitted.on(mesh_of(**MESHES[mesh]))
            self.known.append(Known(k.program, mesh, k.option, made, made))

    @rule(program=programs, mesh=st.sampled_from(["2x4", "8", "explicit", "reversed"]))
    def for_the_mesh_that_is_set(self, program, mesh):
        made, on = gshard.jit(PROGRAMS[program].function), mesh_of(**MESHES[mesh])

        def call(*arguments):
            with jax.set_mesh(on):
                return made(*arguments)

        self.known.append(Known(program, mesh, "set", _Under(made, on), call))

    # What calls them.

    @rule(
        i=indices, both=st.tuples(ways, ways), shape=shapes, dtype=dtypes, seed=indices, times=st.sampled_from([1, 3])
    )
    def call(self, i, both, shape, dtype, seed, times):
        if k := self.one(i):
            shape, dtype = k.compiled.get(None, (shape, dtype))
            arguments, _ = self.placed(k, both, shape, dtype, seed)
            self.check(k, arguments, times, f"{both}, {shape}")

    @rule(i=indices, way=ways, seed=indices)
    def call_a_square_alike(self, i, way, seed):
        """Both arguments alike, of one shape: many of the histories' calls are of one kind."""
        if k := self.one(i, ("plan",)):
            arguments, _ = self.placed(k, (way, way), (8, 8), np.int32, seed)
            self.check(k, arguments, 2, way)

    @rule(i=indices)
    def call_again(self, i):
        k = self.one(i)
        if k and k.last is not None:
            self.check(k, k.last, 1, "again")

    @rule(i=indices, way=ways)
    def call_with_one_array_twice(self, i, way):
        if k := self.one(i, ("donated", "plan")):
            x = PLACES[way](numbers((8, 8), 3), k.on)
            self.check(k, k.small.arguments(x, x), 2, f"{way}, twice the same")

    @rule(i=indices)
    def call_with_results(self, i):
        k = self.one(i, ("plan",))
        same = [x for x in self.results if x.shape == self.results[0].shape]
        if k and same and min(same[0].shape) > 7:
            self.check(k, k.small.arguments(same[0], same[-1]), 2, "results")

    @rule(i=indices, both=st.tuples(ways, ways), seed=indices)
    def compile_and_call(self, i, both, seed):
        if k := self.one(i, ("plan", "set")):
            first, _ = self.placed(k, ("numpy", "numpy"), (8, 8), np.int32, seed)
            other, _ = self.placed(k, both, (8, 8), np.int32, seed + 1)
            compiled = k.jitted.lower(*first).compile()
            ahead = Known(k.program, k.mesh, k.option, k.jitted, compiled)
            for arguments in (first, other, first):
                self.check(ahead, arguments, 1, f"compiled, {both}")

    # Transformations.

    @rule(i=indices, way=arrays, seed=indices)
    def inside_jax_jit(self, i, way, seed):
        """JAX takes arguments on the mesh's devices only, in their order, and names results in the arguments' mesh."""
        if k := self.one(i, ("limited", "plan", "set")):
            arguments, (x, y) = self.placed(k, (way, way), (8, 8), np.int32, seed)
            plain = jax.jit(k.small.function)
            try:
                self.transformed(k, jax.jit(k.jitted), plain, arguments, k.small.arguments(x, y), way)
            except ValueError as error:
                if not re.search("incompatible devices|is incompatible with mesh_shape", str(error)):
                    raise

    @rule(i=indices, both=st.tuples(arrays, arrays), seed=indices)
    def mapped(self, i, both, seed):
        k = self.one(i, ("limited", "plan", "set"))
        if k and k.small.mapped:
            x, y = (np.stack([numbers((8, 8), seed % 4 + s) for s in pair]) for pair in ((0, 1), (2, 3)))
            arguments = k.small.arguments(*(PLACES[way](v, k.on) for way, v in zip(both, (x, y), strict=True)))
            around = jax.vmap(k.jitted), jax.vmap(k.small.function)
            self.transformed(k, *around, arguments, k.small.arguments(x, y), both)

    @rule(i=indices, both=st.tuples(arrays, arrays), seed=indices, inside=st.booleans())
    def differentiated(self, i, both, seed, inside):
        k = self.one(i, ("limited", "plan", "set", "donated"))
        if not k or not k.small.linear:
            return

        def gradient(f):
            def pulled(*arguments):
                results, back = jax.vjp(f, *arguments)
                return back(jax.tree.map(lambda r: r * 0 + np.arange(r.size).reshape(r.shape) % 5 - 2, results))

            return pulled

        arguments, (x, y) = self.placed(k, both, (8, 8), np.float32, seed)
        ours = gshard.jit(gradient(k.small.function), mesh=k.on) if inside else gradient(k.jitted)
        plain = jax.jit(gradient(k.small.function))
        self.transformed(k, ours, plain, arguments, k.small.arguments(x, y), both)

    def transformed(self, k, ours, plain, arguments, whole, both):
        want = jax.tree.map(np.asarray, plain(*whole))
        under = k.on if k.mesh == "explicit" else None  # JAX wants it set around transformations
        for _ in range(2):
            with jax.set_mesh(under) if under else contextlib.nullcontext(), allowed_to_refuse(plain, arguments, under):
                called(ours, arguments, want, where=f"{k!r}, {both}")

    # What should change nothing.

    @rule(i=indices, way=ways)
    def explain(self, i, way):
        if k := self.one(i, ("plan", "set")):
            arguments, _ = self.placed(k, (way, "numpy"), (8, 8), np.int32, 0)
            with allowed_to_refuse(k.small.function, arguments):
                assert str(gshard.explain(k.jitted, *arguments))

    @rule(i=indices)
    def search(self, i):
        if k := self.one(i, ("plan", "set", "limited")):
            shape = jax.ShapeDtypeStruct((8, 8), np.int32)
            shapes = k.small.arguments(shape, shape)
            found = gshard.search(k.jitted, *shapes, mesh=k.on, machine="h100:1x8", budget_seconds=0.1)
            assert found.plan is not None

    @rule(i=indices)
    def clear(self, i):
        if k := self.one(i, ("set",)):
            k.jitted.clear_cache()

    @rule()
    def clear_everything(self):
        jax.clear_caches()

    @rule(which=st.integers(0, len(RULES) - 1))
    def register_another_rule(self, which):
        register(which)


@dataclasses.dataclass(frozen=True)
class _Under:
    """A jitted function for the mesh that is set, under this one."""

    jitted: Any
    mesh: jax.sharding.Mesh

    def lower(self, *arguments):
        with jax.set_mesh(self.mesh):
            return self.jitted.lower(*arguments)


def run(histories, steps):
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),  # each shorter history would be compiled anew
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_call_of_a_history_is_right():
    run(10, 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_call_of_very_many_histories_is_right():
    run(100, 80)
