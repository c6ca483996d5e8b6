"""Plans by shape and dtype: narrow elements, dimensions smaller than the mesh, states that go round, joined ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from families import SMALL
from gshard.core.mesh import Mesh
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.planning.strategies import share
from gshard.xla.hlo_collectives import collectives
from placed import in_every_way, mesh_of

SIZE, BATCH = 64, 512
WHOLE = SIZE * SIZE * 7 // 8  # bytes that a device sends to gather one byte for each element of a weight


@pytest.fixture
def x(rng):
    return rng.integers(-3, 4, (BATCH, SIZE)).astype(np.float32)


@pytest.fixture
def w(rng):
    return rng.integers(-3, 4, (SIZE, SIZE)).astype(np.float32)


def rounded(w):
    return (jnp.tanh(w) * 100).astype(jnp.int8).astype(jnp.float32) / 4


def rounded_to_bfloat16(w):
    return jnp.abs(jax.lax.reduce_precision(jnp.sin(w), 8, 7).astype(jnp.bfloat16)).astype(jnp.float32) * 2


def masked(w):
    return (w > 0).astype(jnp.float32) + 1


@pytest.mark.parametrize(("widened", "size"), [(rounded, 1), (rounded_to_bfloat16, 2), (masked, 1)])
def test_it_is_gathered_before_it_is_widened(widened, size, w, x):
    def f(w, x):
        w, x = gshard.split(w, 0, "data"), gshard.split(x, 0, "data")
        return x @ widened(w)

    mesh = mesh_of(data=8)
    partitioned = gshard.jit(f, mesh=mesh)
    found = gshard.explain(partitioned, w, x)
    assert found.bytes_by_kind == {"all_gather": size * WHOLE}
    compiled = collectives(partitioned.lower(w, x).compile().as_text())
    assert sum(c.total_bytes for c in compiled) == size * WHOLE
    for got in in_every_way(partitioned, (w, x), mesh):
        np.testing.assert_allclose(got, jax.jit(f)(w, x), rtol=1e-6, atol=1e-6)


def test_what_else_is_gathered_narrow(rng, w, x):
    """What is narrowed, and weights that are stored narrow with scales; where nothing moves, nothing is gathered."""

    def narrowed(w, x):
        w, x = gshard.split(w, 0, "data"), gshard.split(x, 0, "data")
        return x.astype(jnp.bfloat16) @ (jnp.tanh(w) * 2).astype(jnp.bfloat16)

    def stored(q, scale, x):
        q, scale, x = gshard.split((q, scale, x), 0, "data")
        return x @ (jnp.clip(q, -9, 9).astype(jnp.float32) * jnp.abs(scale))

    assert gshard.explain(narrowed, w, x, mesh={"data": 8}).bytes_by_kind == {"all_gather": 2 * WHOLE}
    q, scale = rng.integers(-127, 128, (SIZE, SIZE)).astype(np.int8), np.ones((SIZE, 1), np.float32) / 4
    assert gshard.explain(stored, q, scale, x, mesh={"data": 8}).total_bytes == WHOLE + SIZE * 4 * 7 // 8
    f = gshard.jit(lambda w: rounded(gshard.split(w, 0, "data")) + 1, mesh={"data": 8})
    assert not gshard.explain(f, w).total_bytes
    assert f(w).sharding.shard_shape(w.shape) == (SIZE // 8, SIZE)


@pytest.mark.parametrize("machine", ["v5e:2x4", "h100:1x8"])
def test_it_is_gathered_narrow_if_planned_for_a_machine(machine):
    def f(w, x):
        w, x = gshard.split(w, 0, "data"), gshard.split(x, 0, "data")
        return x @ rounded(w)

    shapes = [jax.ShapeDtypeStruct((rows, 4096), "float32") for rows in (4096, 65536)]
    found = gshard.explain(f, *shapes, mesh=gshard.Mesh.abstract(data=8), machine=machine)
    assert found.bytes_by_kind == {"all_gather": 4096 * 4096 * 7 // 8}


# Dimensions smaller than the mesh: idle devices, copies and cuts of other dimensions cost what they take.
LINE = Mesh.abstract(x=8)
# What XLA's partitioner sends for the same marks and executes on the busiest device (jax 0.10.2), in bytes and FLOPs.
XLA = {
    "small/linear_vit": (120, 124_701_160), "small/linear_vit_step": (1_587_292, 378_471_872),
    "small/linear_vit_both_step": (2_922_240, 220_281_312), "small/neural_operator": (14_026_752, 471_579_904),
    "small/vorticity_of_one": (1_850_240, None), "small/unet_step": (20_034, None),
    "small/graphs_step": (29_568, None), "small/lstm_step": (1_731_072, None), "small/experts_step": (259_392, None),
    "small/sampled_batch_1": (1_403_136, None), "small/protein_on_cube_step": (391_488, None),
}  # fmt: skip
SLOW = {"small/protein_on_cube_step"}  # to plan


def sent(spmd):
    return sum(c.total_bytes for c in spmd.collectives)


def lowered(f, *shapes):
    return gshard.jit(f, mesh=LINE).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in XLA])
@pytest.mark.one_in(2)
def test_no_more_is_sent_than_by_xla(name):
    case = SMALL[name]
    spmd = gshard.jit(case.function, mesh=Mesh.abstract(**case.mesh)).lower(*case.arguments).spmd
    bytes_of_xla, flops_of_xla = XLA[name]
    assert sent(spmd) <= bytes_of_xla
    if flops_of_xla is not None:
        # An operation of an exponential counts as one here, and as none there.
        assert cost(spmd, Machine.of("h100:1x8")).flops <= 1.05 * flops_of_xla


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 8, 12])
def test_a_batch_is_data_parallel_whatever_its_size(batch):
    """Products of each example by itself send nothing, though some devices have no example."""

    def f(x, w):
        x = gshard.split(x, 0, "x")
        return gshard.split(jnp.tanh(jnp.tanh(x @ w) @ w), 0, "x").sum((1, 2))

    assert sent(lowered(f, (batch, 256, 512), (512, 512)).spmd) <= batch * 4 * 8, "only sums of examples may move"


def shares(lowered):
    """Of the work of each product, the share of the busiest device."""
    plan = lowered.plan
    return [share(e.rule, plan.splits[e], LINE) for e in plan.program.block.walk() if e.name == "dot_general"]


@pytest.mark.parametrize("batch", [4, 12])
def test_no_device_computes_more_than_the_busiest_one_of_the_marks(batch):
    def f(x, w):
        return gshard.split(x, 0, "x") @ w

    (product,) = shares(lowered(f, (batch, 256, 512), (512, 512)))
    assert product <= -(-batch // 8) / batch


def test_weights_in_parts_ask_for_no_other_cut_of_a_small_batch():
    """The weights are gathered, as with a large batch: they are smaller than what the other devices would need."""

    def f(x, w):
        return gshard.split(gshard.split(x, 0, "x") @ gshard.split(w, 0, "x"), 0, "x")

    made = lowered(f, (4, 4096, 512), (512, 512))
    assert shares(made) == [1 / 4]
    weights = [c for c in made.spmd.collectives if c.value is not None and c.value.shape == (512, 512)]
    assert [(c.kind, c.total_bytes) for c in weights] == [("all_gather", 7 * 512 * 512 * 4 // 8)]


def test_idle_devices_are_used_where_that_is_worth_it():
    """Rows are moved once, for eight products of half the time: an operation counts a thousandth of a byte."""

    def f(x, w):
        y = gshard.split(x, 0, "x")
        for _ in range(8):
            y = jnp.tanh(y @ w)
        return y.sum()

    made = lowered(f, (4, 8192, 1024), (1024, 1024))
    assert shares(made) == [1 / 8] * 8
    assert sent(made.spmd) < 8 * (2 * 4 * 8192 * 1024 * 1024) * (1 / 4 - 1 / 8) / 1000


@pytest.mark.parametrize(("rows", "parts"), [(12, 4), (4, 4), (6, 2), (13, 1)])
def test_a_result_leaves_in_as_many_equal_parts_as_there_can_be(rows, parts):
    def f(x):
        return jnp.tanh(gshard.split(x, 0, "x"))

    x = np.linspace(-1, 1, rows * 7, dtype=np.float32).reshape(rows, 7)
    y = gshard.jit(f, mesh={"x": 8})(x)
    assert y.sharding.shard_shape(y.shape) == (rows // parts, 7)
    np.testing.assert_allclose(np.asarray(y), np.tanh(x), rtol=1e-5)


# A training state goes round: each call gets it as the one before has left it, also where parts are unequal.
STATES = [
    ((2, 8, 12), [4]), ((6, 12, 4), [4]), ((4, 8, 8), [4]), ((3, 5, 7), [4]), ((6, 3, 3), [2, 4]), ((6, 12, 4), [2, 4]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "sizes"), STATES)
def test_a_state_is_sharded_alike_after_every_call(shape, sizes):
    """One program serves all steps, the first too, and a run that is resumed from a checkpoint has the same ones."""
    traced, parts, mesh = [], math.prod(sizes), dict(zip("ab", sizes, strict=False))

    def step(state, x):
        traced.append(1)
        w = gshard.split(state["w"], 0, parts)
        h = jnp.einsum("eij,ebi->ebj", w, gshard.split(x, 0, parts))
        return {"w": state["w"] - 0.25 * jnp.einsum("ebi,ebj->eij", x, h), "m": state["m"] * 0.5 + h.sum((0, 1))}

    run = gshard.jit(step, mesh=mesh, donate_argnums=0)
    x = np.random.default_rng(0).integers(-2, 3, (shape[0], 6, shape[1])).astype(np.float32)
    state = {"w": np.ones(shape, np.float32), "m": np.zeros(shape[2], np.float32)}
    spmd = run.lower(state, x).spmd
    assert spmd.in_shardings[:2] == spmd.out_shardings
    if shape[0] == 6:
        assert any(spmd.in_shardings[1].dims), "not whole"
        whole = gshard.jit(step, mesh=mesh).lower(state, x).spmd
        assert not any(whole.in_shardings[1].dims), "what is not donated comes whole, which sends nothing"
    traced.clear()
    expected, left = jax.jit(step), []
    for _ in range(4):
        before = jax.tree.map(np.array, state)
        state = run(state, x)
        left.append(jax.tree.map(lambda a: a.sharding, state))
        assert left[-1] == left[0]
        near(state, expected(before, x), 1e-6, 0)
    assert len(traced) <= 1, "by jax.jit; ours was traced before"


# Batch and length joined, and masks: what is planned where a dimension that is split becomes a part of another one.
def flattened(x, w, v):
    return (x.reshape(64, 64) @ w) @ v


def experts(x, up, down, gate):
    t = x.reshape(64, 64)
    p = jax.nn.softmax(t @ gate)
    h = jax.nn.relu(jnp.einsum("tm,emh->eth", t, up))
    return jnp.einsum("eth,ehm,te->tm", h, down, p).reshape(4, 16, 64)


def patches(x, w, v):
    h = x.reshape(4, 32, 64)
    for _ in range(3):
        centred = h - h.mean(-1, keepdims=True)
        h = h + jax.nn.gelu(centred * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) @ w) @ v
    return h


def attention(x, ok, wq, wk, wv):
    q, k, v = (x @ wq).reshape(4, 16, 4, 16), x @ wk, x @ wv
    s = jnp.where(ok[:, None, None, :], jnp.einsum("bshd,btd->bhst", q, k), -1e9)
    return x + jnp.einsum("bhst,btd->bshd", jax.nn.softmax(s), v).reshape(4, 16, 64)


LENGTH, ROWS = P(None, "x"), P(None, None, "x")
CASES = {
    # what one all-to-all of an eighth of x sends, or gathers of keys, values and mask
    "flattened": (flattened, ((4, 16, 64), (64, 128), (128, 64)), (LENGTH, None, None), 4 * 16 * 64 * 4 // 8),
    "experts": (
        experts, ((4, 16, 64), (4, 64, 128), (4, 128, 64), (64, 4)), (LENGTH, None, None, None), 4 * 16 * 64 * 4 // 8
    ),
    "patches": (patches, ((4, 4, 8, 64), (64, 256), (256, 64)), (ROWS, None, None), 4 * 32 * 64 * 4 // 8),
    "attention": (
        attention, ((4, 16, 64), (4, 16), (64, 64), (64, 16), (64, 16)), (LENGTH, LENGTH, None, None, None),
        2 * 4 * 16 * 16 * 4 + 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(2)
def test_no_more_is_sent_than_by_hand(name):
    """Rows of the joined dimension go where they belong once; no product is computed by all devices."""
    f, shapes, specs, most = CASES[name]
    rng = np.random.default_rng(0)
    arguments = [(rng.standard_normal(s) / 8).astype(np.float32) for s in shapes]
    if name == "attention":
        arguments[1] = arguments[1] > -0.1
    run = gshard.jit(f, mesh={"x": 8}, in_shardings=specs)
    assert sum(gshard.explain(run, *arguments).bytes_by_kind.values()) <= most
    np.testing.assert_allclose(run(*arguments), jax.jit(f)(*arguments), rtol=1e-4, atol=1e-4)
    plan = run.lower(*arguments).plan
    for e in plan.program.block.equations:
        if e.name == "dot_general":
            assert any(plan.splits[e].values())


def test_a_mask_that_is_all_there_is_is_followed():
    def f(scores, ok):
        return jnp.where(gshard.split(ok, 1, 8)[:, None, :], scores, 0.0)

    plan = gshard.jit(f, mesh=8).lower(np.ones((2, 3, 16), np.float32), np.ones((2, 16), bool)).plan
    assert plan.format(plan.program.block.outputs[0]) == "f32[2,3,16@devices]"
