"""What is read from a compiled module: buffers, dataflow, kernels, times, and names of operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.device.machine import Machine
from gshard.xla.dataflow import Array, Dataflow
from gshard.xla.hlo_collectives import collectives_of, computations_run
from gshard.xla.hlo_parser import Origin, arrays_of, origin_of, read_module, type_bytes
from gshard.xla.kernels import Work, aliased_results, bytes_in_memory, elapsed, held_by, work_of


def layers(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()


def written_out(x, ws):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x.sum()


def attention(x, ws):
    q, k, v = (x @ w for w in ws[:3])
    return (jax.nn.softmax(q @ k.T) @ v).sum()


@pytest.mark.optimised
@pytest.mark.parametrize("f", [layers, written_out, attention])
@pytest.mark.parametrize("differentiated", [False, True])
def test_temporaries_are_near_those_of_the_compiler(f, differentiated):
    run = jax.grad(f, (0, 1)) if differentiated else f
    compiled = jax.jit(run).lower(jnp.ones((256, 256)), jnp.ones((6, 256, 256))).compile()
    held, report = held_by(read_module(compiled.as_text())), compiled.memory_analysis()
    assert held.arguments == report.argument_size_in_bytes
    assert held.results == pytest.approx(report.output_size_in_bytes, abs=64)
    assert held.temporaries == pytest.approx(report.temp_size_in_bytes, rel=0.3, abs=300_000)
    assert sum(h.bytes for h in held.alive) == held.temporaries


def test_donated_arguments_hold_the_results():
    f = jax.jit(lambda x, y: (y * 2, x + 1, x.sum()), donate_argnums=(0, 1))
    module = read_module(f.lower(jnp.ones(1000), jnp.ones((500, 3))).compile().as_text())
    assert aliased_results(module) == {0: 1, 1: 0}
    held = held_by(module)
    assert (held.shared, held.peak - held.temporaries) == (4 * 1000 + 4 * 1500, 4 * 1000 + 4 * 1500 + 4)


def test_what_updates_in_place_takes_no_second_buffer():
    text = """HloModule m, is_scheduled=true, num_partitions=1

ENTRY %main (x: f32[100,10], y: f32[1,10]) -> f32[] {
  %x = f32[100,10]{1,0} parameter(0)
  %y = f32[1,10]{1,0} parameter(1)
  %i = s32[] constant(3)
  %c = f32[100,10]{1,0} copy(%x)
  %u = f32[100,10]{1,0} dynamic-update-slice(%c, %y, %i, %i)
  %unread = f32[50,10]{1,0} slice(%u), slice={[0:50], [0:10]}
  %n = f32[100,10]{1,0} negate(%u)
  ROOT %r = f32[] custom-call(%n), custom_call_target="sum"
}
"""
    held = held_by(read_module(text))
    # The copy, updated and negated in place, and the slice that nothing reads while it is made.
    assert held.temporaries == 4000 + 2000
    assert [h.made.name for h in held.alive] == ["c", "unread"]


def test_arrays_on_the_chip_and_on_the_host_do_not_count():
    text = """HloModule m, is_scheduled=true, num_partitions=1

ENTRY %main (x: f32[100,10]) -> f32[100,10] {
  %x = f32[100,10]{1,0} parameter(0)
  %c = f32[100,10]{1,0:S(1)} copy(%x)
  %d = f32[100,10]{1,0} negate(%c)
  ROOT %r = f32[100,10]{1,0} negate(%d)
}
"""
    assert held_by(read_module(text)).temporaries == 4000


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def flow_of(f, mesh, *arguments):
    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in arguments
    ]
    return Dataflow(read_module(jax.jit(f).lower(*given).compile().as_text()))


def moved(flow, kind):
    found = []
    for sent in collectives_of(flow.module):
        if sent.kind == kind:
            several = len(sent.itself.operands) > 1
            for i, operand in enumerate(sent.itself.operands):
                result = Array(sent.computation, sent.ends.name, i if several else None)
                found.append((Array(sent.inside, operand), result))
    return found


def whole(x, mesh, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def test_a_gathered_weight_is_the_argument_through_casts_and_transposes(mesh):
    def f(x, w):
        return x @ whole(w.T.astype(jnp.bfloat16).astype(jnp.float32), mesh)

    flow = flow_of(f, mesh, ((64, 32), ("data",)), ((16, 32), ("model",)))
    gathers = moved(flow, "all_gather")
    assert [flow.arguments(operand) for operand, _ in gathers] == [(1,)]
    assert [flow.arguments(result) for _, result in gathers] == [(1,)]
    readers = [made.opcode for _, result in gathers for _, made in flow.readers(result)]
    assert "dot" in readers or "custom-call" in readers


def test_a_layer_of_stacked_weights_in_a_loop_is_the_argument(mesh):
    def f(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ whole(w, mesh)), None), x, ws)[0]

    flow = flow_of(f, mesh, ((64, 32), ("data",)), ((5, 32, 32), (None, "model")))
    gathers = moved(flow, "all_gather")
    assert gathers
    assert {flow.arguments(operand) for operand, _ in gathers} == {(1,)}


def test_what_a_loop_changes_is_no_argument(mesh):
    def f(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(whole(x, mesh) @ w), None), x, ws)[0]

    flow = flow_of(f, mesh, ((64, 32), ("data",)), ((5, 32, 32), ()))
    operands = [
        operand for kind in ("all_gather", "all_to_all", "collective_permute") for operand, _ in moved(flow, kind)
    ]
    assert all(flow.arguments(operand) in ((), (0,)) for operand in operands)
    inner = [o for o in operands if o.computation != flow.module.entry]
    assert all(flow.arguments(operand) == () for operand in inner)


def test_a_gradient_reaches_the_result_and_meets_its_weight(mesh):
    def f(w, v, x):
        a, b = jax.grad(lambda w, v: (jnp.tanh(x @ w) @ v).sum(), (0, 1))(w, v)
        return w - 0.1 * a, v - 0.2 * b

    flow = flow_of(f, mesh, ((32, 48), ()), ((48, 16), ()), ((64, 32), ("data",)))
    reached = [flow.reach(result) for _, result in moved(flow, "all_reduce")]
    assert {(tuple(r.results), tuple(r.beside)) for r in reached} == {((0,), (0,)), ((1,), (1,))}


def test_a_join_of_arguments_is_all_of_them_and_what_is_computed_is_another_array(mesh):
    def root_of(f, *arguments):
        flow = flow_of(f, mesh, *arguments)
        return flow, Array(flow.module.entry, flow.module.computations[flow.module.entry].root)

    for join, arguments in (
        (lambda *x: jnp.concatenate(x), (0, 1, 2)), (lambda *x: jnp.stack(x), (0, 1, 2)),
        (lambda x, *y: jnp.concatenate([x, jnp.exp(y[0])]), ()),
    ):  # fmt: skip
        flow, root = root_of(join, *[((8, 4), ())] * 3)
        assert flow.arguments(root) == arguments
    flow, root = root_of(lambda x, w: jnp.exp(x @ w), ((64, 32), ("data",)), ((32, 16), ()))
    assert flow.arguments(root) == ()
    assert flow.made(flow.source(root)).opcode in ("exponential", "fusion", "exp")


def works(text):
    module = read_module(text)
    return [
        (work, times)
        for name, times, _ in computations_run(module)
        for made in module.computations[name].instructions.values()
        if made.opcode not in ("while", "conditional", "call")
        if (work := work_of(module, module.computations[name], made)) is not None
    ]


def total(f, *arguments):
    found = works(jax.jit(f).lower(*arguments).compile().as_text())
    return sum(w.products * n for w, n in found), sum(w.moved * n for w, n in found)


def test_products_and_rounds_of_loops_are_counted():
    a, b = jnp.ones((4, 32, 16)), jnp.ones((4, 16, 8))
    batched = lambda a, b: jnp.einsum("bij,bjk->bik", a, b)  # noqa: E731
    products, moved = total(batched, a, b)
    assert products == 2 * 4 * 32 * 16 * 8
    assert moved >= 4 * (a.size + b.size + 4 * 32 * 8)
    assert total(jax.grad(lambda a, b: jnp.sum(batched(a, b) ** 2), (0, 1)), a, b)[0] == 3 * products
    x, ws = jnp.ones((64, 64)), jnp.ones((7, 64, 64))
    products, moved = total(lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], x, ws)
    assert products == 7 * 2 * 64**3
    # Each round reads one matrix of the stack, not the stack: some arrays of 16 KiB a round, and no 7 x 7 of them.
    assert moved < 7 * 12 * 4 * 64 * 64


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "holes"),
    [(1, "SAME", 1, 1), (2, "VALID", 1, 1), (1, "VALID", 2, 1), (1, ((0, 1), (2, 0)), 1, 3)],
)
def test_a_convolution_counts_pairs_that_meet(stride, padding, dilation, holes):
    image, kernel = jnp.ones((2, 12, 12, 3)), jnp.ones((3, 3, 3, 5))

    def f(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), padding, lhs_dilation=(holes, holes), rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    # Of ones, an element of the result is the number of pairs that meet there.
    met = int(f(image, kernel).sum())
    assert total(f, image, kernel)[0] == 2 * met


# Operands, the root, and what it takes: a batch dimension that libtpu writes as a window as large as the batch, which
# meets one element in each place; a product of cuBLAS; a call of a kernel of somebody's.
WORKS = {
    "libtpu": (
        "bf16[4,32,16]{2,1,0}", "bf16[4,16,8]{2,1,0}", "bf16[4,32,8]{2,1,0} convolution(%a, %b), "
        "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
        Work(2 * 4 * 32 * 16 * 8, 0, 2 * (4 * 32 * 16 + 4 * 16 * 8 + 4 * 32 * 8), "bf16"),
    ),
    "cublas": (
        "f32[32,16]{1,0}", "f32[16,8]{1,0}", "(f32[32,8]{1,0}, s8[4096]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$gemm", x={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}',
        Work(2 * 32 * 16 * 8, 0, 4 * (32 * 16 + 16 * 8 + 32 * 8) + 4096, "f32"),
    ),
    "custom call": (
        "f32[32,16]{1,0}", "f32[1]{0}", 'f32[32,16]{1,0} custom-call(%a), custom_call_target="my_kernel"',
        Work(0, 0, 2 * 4 * 32 * 16, "f32", False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_what_one_instruction_takes(name):
    a, b, root, expected = WORKS[name]
    lines = f"  %a = {a} parameter(0)\n  %b = {b} parameter(1)\n  ROOT %c = {root}\n"
    ((work, _),) = works(f"HloModule m, num_partitions=1\n\nENTRY %main (a: {a}, b: {b}) -> f32[] {{\n{lines}}}\n")
    assert work == expected


def test_a_product_of_groups_meets_each_row_once():
    """A product of rows with the matrix of their group, and its gradients, as JAX lowers them for TPU."""
    text = """HloModule m, num_partitions=1

ENTRY %main (x: bf16[64,32], w: bf16[4,32,16], n: s32[4]) -> (bf16[64,32], bf16[4,32,16]) {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[4,32,16]{2,1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  %y = bf16[64,16]{1,0} ragged-dot(%x, %w, %n), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
lhs_ragged_dims={0}, rhs_group_dims={0}
  %dx = bf16[64,32]{1,0} ragged-dot(%y, %w, %n), lhs_contracting_dims={1}, rhs_contracting_dims={2}, \
lhs_ragged_dims={0}, rhs_group_dims={0}
  %dw = bf16[4,32,16]{2,1,0} ragged-dot(%x, %y, %n), lhs_contracting_dims={0}, rhs_contracting_dims={0}, \
lhs_ragged_dims={0}
  ROOT %all = (bf16[64,32]{1,0}, bf16[4,32,16]{2,1,0}) tuple(%dx, %dw)
}
"""
    assert [(w.products, w.dtype) for w, _ in works(text)] == [(2 * 64 * 32 * 16, "bf16")] * 3


def test_types():
    types = arrays_of("(f32[8,4]{1,0:T(8,128)S(1)}, bf16[<=6]{0}, pred[3], u32[]{:S(2)})")
    assert [(str(a), a.bytes, a.is_on_chip) for a in types] == [
        ("f32[8,4]", 128, True), ("bf16[6]", 12, False), ("pred[3]", 3, False), ("u32[]", 4, True),
    ]  # fmt: skip
    assert bytes_in_memory("(f32[8,4]{1,0:S(1)}, bf16[6]{0:S(5)}, f8e4m3fn[8])") == 12 + 8
    sizes = {"f32[8,4]{1,0}": 128, "(c64[2], (pred[3], u8[]))": 20, "f8e4m3fn[5]": 5, "s4[3]": 2, "token[]": 0}
    assert {text: type_bytes(text) for text in sizes} == sizes


MACHINE = Machine.of("h100:1x8")
PRODUCT = 2 * 4096**3 / MACHINE.rate("bf16")

TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%body (s: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %s = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[4096,4096]{1,0} get-tuple-element(%s), index=1
  %first = (bf16[4096,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%x), channel_id=1, dimensions={0}
  %second = (bf16[4096,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%x), channel_id=2, dimensions={0}
  %y = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = bf16[4096,4096]{1,0} all-gather-done(%first)
  %two = bf16[4096,4096]{1,0} all-gather-done(%second)
  %z = bf16[4096,4096]{1,0} all-reduce(%y), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %t = (s32[], bf16[4096,4096]{1,0}) tuple(%i, %z)
}

%end (s.1: (s32[], bf16[4096,4096])) -> pred[] {
  %s.1 = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (a: bf16[4096,4096]) -> (s32[], bf16[4096,4096]) {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[4096,4096]{1,0}) tuple(%zero, %a)
  ROOT %loop = (s32[], bf16[4096,4096]{1,0}) while(%start), condition=%end, body=%body, known_trip_count={"n":"3"}
}
"""


def timed(seconds):
    def network(sent, size):
        return seconds if size > 1 else 0.0

    module = read_module(TEXT)
    return {row.made.name: row for row in elapsed(module, MACHINE, network, collectives_of(module)).kernels()}


def test_what_is_shorter_than_the_product_beside_it_is_hidden_and_collectives_queue_for_the_network():
    rows = timed(PRODUCT / 4)
    assert rows["first"].seconds == rows["second"].seconds == 0
    assert rows["z"].seconds == rows["z"].duration == pytest.approx(PRODUCT / 4)
    assert {row.times for row in rows.values()} == {3}
    rows = timed(PRODUCT)
    product = rows["y"].seconds  # with its launch
    assert rows["first"].seconds == 0
    assert abs(rows["second"].seconds - (2 * PRODUCT - product)) < 1e-9
    assert abs(sum(dict(rows["second"].parts).values()) - rows["second"].seconds) < 1e-12
    for seconds in (0.0, PRODUCT / 3, PRODUCT, 5 * PRODUCT):  # all that is waited for counts once
        rows = timed(seconds)
        whole = sum(row.seconds for row in rows.values())
        assert abs(whole - (max(rows["y"].seconds, 2 * seconds) + seconds)) < 1e-9


@pytest.mark.parametrize(("op_name", "expected"), [
    ("jit(f)/dot_general", Origin("dot_general")), ("broadcast.32", Origin("broadcast")), ("", Origin()),
    ("jit(f)/decoder/layers_0/mlp/dot_general", Origin("dot_general", "decoder/layers_0/mlp")),
    ("jit(f)/jvp(decoder)/layers_0/add", Origin("add", "decoder/layers_0")),
    ("jit(f)/transpose(jvp(decoder))/layers_0/add", Origin("add", "decoder/layers_0", True)),
    ("jit(f)/transpose(jvp(jit(take_along_axis)))/scatter-add", Origin("scatter-add", "", True)),
    ("jit(f)/vmap(mlp)/while/body/closed_call/mul", Origin("mul", "mlp")),
    ("jit(f)/jvp()/checkpoint/rematted_computation/attn/exp", Origin("exp", "attn", False, True)),
    ("jit(f)/attn/BTNH,BSNH->BNTS/dot_general", Origin("dot_general", "attn")),
    ("jit(f)/mlp/mul;mlp/add", Origin("mul", "mlp")),
    ("jit(f)/checkpoint/(rematted_computation/mlp/dot:mlp/dot)", Origin("dot", "mlp", False, True)),
])  # fmt: skip
def test_a_name_stack(op_name, expected):
    assert origin_of(op_name) == expected


def test_those_that_jax_writes():
    def loss(w, x):
        def layer(x, w):
            with jax.named_scope("mlp"):
                return jnp.tanh(x @ w), None

        with jax.named_scope("decoder"):
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
        return x.sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).compile().as_text()
    module = read_module(text)
    found = {origin_of(m.op_name) for c in module.computations.values() for m in c.instructions.values() if m.op_name}
    products = {o for o in found if o.operation == "dot_general"}
    assert {o.module for o in products} == {"decoder/mlp"}
    assert {(o.is_backward, o.is_recomputed) for o in products} >= {(False, False), (True, False)}
    assert "tanh" in {o.operation for o in found}
