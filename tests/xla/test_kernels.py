"""Operations and memory traffic of the instructions of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from gshard.xla.hlo_collectives import computations_run
from gshard.xla.hlo_parser import read_module
from gshard.xla.kernels import Work, arrays_of, bytes_in_memory, work_of


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
    """Operations of products, and bytes moved, of one call."""
    found = works(jax.jit(f).lower(*arguments).compile().as_text())
    return sum(w.products * n for w, n in found), sum(w.moved * n for w, n in found)


def test_a_product():
    a, b = jnp.ones((64, 128)), jnp.ones((128, 256))
    products, moved = total(lambda a, b: a @ b, a, b)
    assert products == 2 * 64 * 128 * 256
    assert moved >= 4 * (64 * 128 + 128 * 256 + 64 * 256)


def test_products_of_a_batch_and_their_gradient():
    a, b = jnp.ones((4, 32, 16)), jnp.ones((4, 16, 8))
    assert total(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), a, b)[0] == 2 * 4 * 32 * 16 * 8
    gradient = jax.grad(lambda a, b: jnp.sum(jnp.einsum("bij,bjk->bik", a, b) ** 2), (0, 1))
    assert total(gradient, a, b)[0] == 3 * 2 * 4 * 32 * 16 * 8


def test_a_loop_counts_its_rounds():
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


def test_a_product_as_libtpu_writes_it():
    """A batch dimension is a window as large as the batch, which meets one element in each place."""
    text = """HloModule m, num_partitions=1

ENTRY %main (a: bf16[4,32,16], b: bf16[4,16,8]) -> bf16[4,32,8] {
  %a = bf16[4,32,16]{2,1,0} parameter(0)
  %b = bf16[4,16,8]{2,1,0} parameter(1)
  ROOT %c = bf16[4,32,8]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}
"""
    ((work, _),) = works(text)
    assert work == Work(2 * 4 * 32 * 16 * 8, 0, 2 * (4 * 32 * 16 + 4 * 16 * 8 + 4 * 32 * 8), "bf16")


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


def test_a_product_of_cublas():
    text = """HloModule m, num_partitions=1

ENTRY %main (a: f32[32,16], b: f32[16,8]) -> (f32[32,8], s8[4096]) {
  %a = f32[32,16]{1,0} parameter(0)
  %b = f32[16,8]{1,0} parameter(1)
  ROOT %c = (f32[32,8]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", x={DIMS}
}
""".replace("DIMS", '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}')
    ((work, _),) = works(text)
    assert (work.products, work.dtype, work.is_known) == (2 * 32 * 16 * 8, "f32", True)


def test_a_custom_call_counts_by_its_bytes():
    text = """HloModule m, num_partitions=1

ENTRY %main (a: f32[32,16]) -> f32[32,16] {
  %a = f32[32,16]{1,0} parameter(0)
  ROOT %c = f32[32,16]{1,0} custom-call(%a), custom_call_target="my_kernel"
}
"""
    ((work, _),) = works(text)
    assert work == Work(0, 0, 2 * 4 * 32 * 16, "f32", False)


def test_types():
    types = arrays_of("(f32[8,4]{1,0:T(8,128)S(1)}, bf16[<=6]{0}, pred[3], u32[]{:S(2)})")
    assert [(str(a), a.bytes, a.is_on_chip) for a in types] == [
        ("f32[8,4]", 128, True), ("bf16[6]", 12, False), ("pred[3]", 3, False), ("u32[]", 4, True),
    ]  # fmt: skip
    assert bytes_in_memory("(f32[8,4]{1,0:S(1)}, bf16[6]{0:S(5)}, f8e4m3fn[8])") == 12 + 8
