"""Programs for CPU, counted as XLA for GPUs and TPUs sends them: dtypes, reduce-scatters, and sums that are added."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from placed import mesh_of

pytestmark = pytest.mark.optimised  # what users get
MESH, REVERSED = mesh_of(a=4, b=2), mesh_of(a=4, b=2, order=range(7, -1, -1))


def held(x, *spec, mesh=MESH):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def given(*shape, spec=(), dtype=jnp.float32, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def rows(f, *arguments, out=None, mesh=MESH):
    """Kind, axes, local type and runs of what a function sends, the least first."""
    jitted = jax.jit(f, out_shardings=None if out is None else NamedSharding(mesh, P(*out)))
    found = gshard.explain(jitted, *arguments)
    return sorted((row.kind, row.axes, row.shape, row.times) for row in found.collectives if row.bytes)


def gathered(x, w):
    return x @ held(w)


BF16, WEIGHT, SUMMED = jnp.bfloat16, {"spec": ("a",)}, {"spec": (None, "a"), "dtype": jnp.bfloat16}
IN_F32 = {"preferred_element_type": jnp.float32}


@pytest.mark.parametrize(("f", "x", "w", "expected"), [
    (gathered, given(8, 64, dtype=BF16), given(64, 32, **WEIGHT, dtype=BF16), ("all_gather", "bf16[16,32]")),
    (gathered, given(8, 64), given(64, 32, **WEIGHT), ("all_gather", "f32[16,32]")),
    # XLA gathers first, and converts then, on GPUs too.
    (lambda x, w: x.astype("f") @ held(held(w, "a").astype("f")), given(8, 64, dtype=BF16), given(64, 32, dtype=BF16),
     ("all_gather", "bf16[16,32]")),
    (lambda x, w: x @ held(held(w.astype(BF16), "a")), given(8, 64, dtype=BF16), given(64, 32, **WEIGHT),
     ("all_gather", "bf16[16,32]")),
    (lambda x, w: held(x @ w, "b"), given(8, 64, **SUMMED), given(64, 32, **WEIGHT, dtype=BF16),
     ("all_reduce", "bf16[4,32]")),
    (lambda x, w: held(jnp.dot(x, w, **IN_F32), "b").astype(BF16), given(8, 64, **SUMMED),
     given(64, 32, **WEIGHT, dtype=BF16), ("all_reduce", "f32[4,32]")),
])  # fmt: skip
def test_collectives_have_the_dtype_of_the_program(f, x, w, expected):
    ((kind, _, shape, _),) = [row for row in rows(f, x, w) if row[0] == expected[0]]
    assert (kind, shape) == expected


def update(w, x, *spec, mesh=MESH):
    """A step of gradient descent; the batch is split over both axes."""
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(held(x, ("a", "b"), mesh=mesh) @ w) ** 2))(held(w, mesh=mesh))
    return w - held(gradient, *spec, mesh=mesh)


@pytest.mark.parametrize("mesh", [MESH, REVERSED], ids=["in order", "reversed"])
@pytest.mark.parametrize("spec", [(("a", "b"),), (None, ("a", "b"))], ids=str)
def test_an_all_reduce_of_which_each_device_reads_a_slice_is_a_reduce_scatter(spec, mesh):
    w, x = given(64, 32, spec=spec, mesh=mesh), given(16, 64, spec=(("a", "b"),), mesh=mesh)
    found = rows(lambda w, x: update(w, x, *spec, mesh=mesh), w, x, out=spec, mesh=mesh)
    sums = "f32[64,32]", "f32[32,64]"
    assert [row[0] for row in found if row[2] in sums] == ["reduce_scatter"]
    whole = rows(lambda w, x: update(w, x, mesh=mesh), given(64, 32, mesh=mesh), x, out=(), mesh=mesh)
    assert [row[0] for row in whole if row[2] in sums] == ["all_reduce"]


def test_slices_along_another_axis_and_results_that_are_read_whole_leave_an_all_reduce():
    x, w = given(8, 64, spec=(None, "a")), given(64, 32, spec=("a",))

    def read_whole(x, w):
        y = held(x @ w)
        return held(y, "a").sum(), y

    assert rows(lambda x, w: held(x @ w, "a"), x, w) == [("reduce_scatter", "a", "f32[8,32]", 1)]
    for f in (lambda x, w: held(held(x @ w), "b"), read_whole):
        assert "reduce_scatter" not in {row[0] for row in rows(f, x, w)}


def test_all_reduces_whose_results_are_only_added_send_once():
    x, w = given(8, 64, spec=(None, "a")), given(64, 32, spec=("a",))

    def added_and_read(x, w, v):
        y = held(x @ w)
        return jnp.tanh(y + held(x @ v)), jnp.sin(y)

    def number(f):
        return sum(times for kind, *_, times in rows(f, x, w, w) if kind == "all_reduce")

    assert number(lambda x, w, v: jnp.tanh(held(x @ w) + held(x @ v))) == 1
    assert number(lambda x, w, v: jnp.tanh(held(x @ w) + held(x @ v) + held(jnp.sin(x) @ v))) == 1
    assert number(added_and_read) == 2


def test_what_is_counted_otherwise_is_listed():
    w, x = given(64, 32, spec=("a",), dtype=BF16), given(16, 64, spec=("a",), dtype=BF16)
    found = gshard.explain(jax.jit(gathered), x, w)
    here = 4 * found.total_bytes // 2  # in float32
    assert found.lists["counted"][0].startswith("1 collective in the program's narrower")
    assert f"itself sends {here / 1024:.1f} KiB" in found.lists["counted"][1]
    assert not gshard.explain(jax.jit(gathered), given(16, 64), given(64, 32, spec=("a",))).lists["counted"]
