"""What XLA's partitioner made of a function, run as a jaxpr, gives what the compiled program gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import NamedSharding

import gshard
from families import CASES, SMALL
from gshard.core.jax_adapter import closed, sub_jaxprs
from gshard.core.xla_workarounds import AS_WRITTEN
from gshard.emit.compile import named_sharding
from gshard.exact.from_hlo import jaxpr_of, partitioned_hlo
from gshard.xla.peer import xla_function
from placed import mesh_of
from steps import STEPS

GRID, LINE, SIX = {"d": 4, "t": 2}, {"d": 8}, {"d": 3, "t": 2}


EXACT = {"xla_allow_excess_precision": False}  # else XLA may keep float32 where a program has bfloat16


def run(program, translated, arguments, options=EXACT):
    """Runs a translated program on its mesh, compiled by XLA."""
    function = jax.extend.core.jaxpr_as_fun(translated.jaxpr)
    jitted = jax.jit(lambda *xs: function(*xs), compiler_options=options)
    if program.mesh.size == 1:
        return jitted(*arguments)
    specs = dict(zip(program.kept, program.in_specs, strict=True))
    mesh = program.mesh.jax_mesh
    placed = [jax.device_put(x, NamedSharding(mesh, specs.get(i, P()))) for i, x in enumerate(arguments)]
    with jax.set_mesh(mesh):
        return jitted(*placed)


def agrees(lowered, arguments, within=1e-6):
    """Compares a translated program with the compiled one; returns the translation."""
    program = partitioned_hlo(lowered)
    translated = jaxpr_of(program)
    numbers = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    compiled = lowered.compile(compiler_options=EXACT)
    placed = jax.tree.map(jax.device_put, list(arguments), list(compiled.input_shardings[0]))
    wanted = jax.tree.leaves(compiled(*placed))
    for found, want in zip(run(program, translated, numbers), wanted, strict=True):
        assert (found.shape, found.dtype) == (want.shape, want.dtype)
        found, want = np.asarray(found, "c16"), np.asarray(want, "c16")
        np.testing.assert_allclose(found, want, 0, within * np.abs(want).max(initial=1e-6, where=np.isfinite(want)))
    return translated


def equations(jaxpr):
    for e in closed(jaxpr)[0].eqns:
        yield e
        for inner in sub_jaxprs(e.params):
            yield from equations(inner)


def constrained(x, mesh, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def summed(x, mesh):
    part = lambda y: lax.psum(y * lax.axis_index("d"), "d")  # noqa: E731
    return jax.shard_map(part, mesh=mesh, in_specs=P("d"), out_specs=P(), axis_names={"d"})(x)


def sent(x, mesh):
    def local(y):
        groups = [[0, 3], [1, 2], [5, 4], [7, 6]]
        parts = lax.psum_scatter(lax.all_gather(y, "d"), "d"), lax.pmax(y, "d")
        whole = jnp.tile(y, (8, 1)) * lax.axis_index("d")
        exchanged = lax.all_to_all(whole, "d", 0, 1, tiled=True), lax.ppermute(y, "d", [(0, 3), (3, 1)])
        grouped = lax.psum(y, "d", axis_index_groups=groups), lax.all_gather(y, "d", axis_index_groups=groups)
        return jax.tree.map(lambda z: z[None], (parts, exchanged, grouped))

    return jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)(x)


ROWS = {
    "product, sort": (GRID, lambda x, m: ((x @ x.T).sum(0), jnp.sort(x, 0), jnp.argsort(x, 1, descending=True))),
    "uneven": (LINE, lambda x, m: jnp.cumsum(constrained(x[:7] * 2, m, "d"), 0)[::-1]),
    "uneven result": (SIX, lambda x, m: constrained(x[:5] + x[1:], m, "d")),
    "argmax": (GRID, lambda x, m: (jnp.argmax(constrained(x[:-1], m, "d"), 0), jnp.argmin(x, 1), lax.top_k(x, 3))),
    "partly manual": (GRID, summed),
    "bool, bfloat16": (LINE, lambda x, m: (x.astype("bfloat16").sum(0), (x > 0).all(0), (x > 0).any(1))),
    "int8, float16": (LINE, lambda x, m: (jnp.prod(x, 0), x.astype("float16").min(0), x.astype("int8").max(0), x[:0])),
    "branches": (LINE, lambda x, m: lax.switch(x[0, 0].astype(int) + 9, [jnp.sum, jnp.max, jnp.min], x)),
    "indices": (GRID, lambda x, m: (x[jnp.array([1, 9, -9])], x.at[jnp.array([1, 30, 3])].add(1.0), x.at[2].max(3.0))),
    "keys": (LINE, lambda x, m: x + jax.random.normal(jax.random.key(3), x.shape)),
    "rbg": (LINE, lambda x, m: x + jax.random.normal(jax.random.key(3, impl="rbg"), x.shape)),
    "collectives": (LINE, sent),
    "matrices": (GRID, lambda x, m: jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(x.T @ x), x.T, lower=True)),
    "not finite": (LINE, lambda x, m: (jnp.isnan(x / 0 * 0), x / 0 > np.float32([np.inf, -np.inf, np.nan, 0, 1, 2]))),
    "one device": ({"d": 1}, lambda x, m: (summed(x, m), lax.scan(lambda c, r: (c + r, c), x[0], x))),
}


@pytest.mark.parametrize("name", ROWS)
def test_functions(name):
    axes, function = ROWS[name]
    mesh = mesh_of(**axes, order=(5, 2, 7, 0, 1, 3, 4, 6))
    x = np.random.default_rng(0).normal(size=(6 if axes is SIX else 8, 6)).astype(np.float32)
    given = NamedSharding(mesh, P(*axes))
    agrees(jax.jit(lambda x: function(x, mesh), in_shardings=given).lower(x), (x,))


def test_explicit_axes_arguments_that_nothing_reads_and_donated_ones():
    mesh = mesh_of(**GRID, explicit=True)
    numbers = np.arange(48, dtype=np.float32).reshape(8, 6)
    arguments = [jax.device_put(numbers, NamedSharding(mesh, P(*spec))) for spec in ("d", "t", "dt")]

    def product(x, _, w):
        return jnp.einsum("ij,kj->ik", x, w, out_sharding=P("d")), x + 1

    with jax.set_mesh(mesh):
        program = partitioned_hlo(jax.jit(product, donate_argnums=0).lower(*arguments))
        translated = jaxpr_of(program)
    assert program.kept == (0, 2)
    np.testing.assert_array_equal(run(program, translated, [numbers] * 3)[0], numbers @ numbers.T)


QUICK = "layers/layer_two_dimensional' moves/roll windows/convolutions contractions/uneven_rows".split()


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in {**CASES, **SMALL}]
)
def test_families(name):
    case = {**CASES, **SMALL}[name]
    lowered = gshard.jit(case.function, mesh=case.jax_mesh).lower(*case.arguments)
    shardings = [named_sharding(lowered.mesh, s) for s in lowered.spmd.in_shardings]
    flat = [*lowered.program.captured, *jax.tree.leaves(case.arguments)]
    agrees(jax.jit(xla_function(lowered.program, lowered.mesh), in_shardings=shardings).lower(*flat), flat, 1e-4)


@pytest.mark.parametrize("name", [n if n == "data" else pytest.param(n, marks=pytest.mark.slow) for n in STEPS])
def test_steps_and_their_lines(name):
    step = STEPS[name]
    lowered = jax.jit(step.function(), out_shardings=step.results()).lower(*step.numbers())
    translated = agrees(lowered, step.numbers(), 1e-4)
    files = {translated.line(e).partition(":")[0] for e in equations(translated.jaxpr)}
    assert {"__init__.py", "model.py"} <= files <= {"__init__.py", "model.py", "test_from_hlo.py", ""}


def test_a_line_is_that_of_the_instruction():
    def f(x):
        y = x * 2
        return jnp.sum(y)

    lowered = jax.jit(f, in_shardings=NamedSharding(mesh_of(**LINE), P("d"))).lower(np.ones(8))
    translated, first = jaxpr_of(partitioned_hlo(lowered)), f.__code__.co_firstlineno
    found = {e.primitive.name: translated.line(e) for e in equations(translated.jaxpr)}
    assert found["mul"].startswith(f"test_from_hlo.py:{first + 1} ")
    assert found["psum"].startswith(f"test_from_hlo.py:{first + 2} ")


def test_what_has_no_translation_is_refused_by_name_and_line():
    lowered = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(np.ones(3, np.float32))
    with pytest.raises(gshard.GShardError, match=r"custom call '\w*callback'(.|\n)*test_from_hlo.py:\d+"):
        jaxpr_of(partitioned_hlo(lowered))


def test_the_persistent_cache_neither_answers_nor_keeps(tmp_path):
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    lowered = jax.jit(lambda x: x * 3).lower(np.ones(3))
    try:
        for name, value in zip(names, (str(tmp_path), 0), strict=True):
            jax.config.update(name, value)
        texts = [partitioned_hlo(lowered).module.computations for _ in range(2)]
        kept = [path.name for path in tmp_path.rglob("*")]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert texts[0] == texts[1]
    assert not kept


def test_xla_errs_after_partitioning():
    """openxla/xla#49176: the partitioned program is right, and what CPU makes of it is not."""

    def moved(x):
        return lax.dynamic_update_slice(x + 1, (x + 1)[:3], (1, 0, 0)).reshape((1, 4, 1))

    x = np.arange(4, dtype=np.int32).reshape(4, 1, 1)
    program = partitioned_hlo(jax.jit(moved).lower(x))
    assert np.ravel(run(program, jaxpr_of(program), [x], AS_WRITTEN)[0]).tolist() == [1, 1, 2, 3]
