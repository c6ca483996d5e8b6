"""The modelled time of compiled programs: kernels, collectives, and what passes beside each other."""

from gshard.device.machine import Machine
from gshard.xla.elapsed import elapsed
from gshard.xla.hlo_parser import read_module

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
    """What runs where every collective takes so many seconds."""

    def network(read, made):
        return seconds if read.operand_bytes > 1 else 0.0

    return {row.made.name: row for row in elapsed(read_module(TEXT), MACHINE, network).ran()}


def test_what_is_shorter_than_the_product_beside_it_is_hidden():
    rows = timed(PRODUCT / 4)
    assert rows["first"].seconds == rows["second"].seconds == 0
    assert rows["z"].seconds == rows["z"].duration
    assert abs(rows["z"].duration - PRODUCT / 4) < 1e-12
    assert {row.times for row in rows.values()} == {3}


def test_collectives_queue_for_the_network():
    rows = timed(PRODUCT)
    product = rows["y"].seconds  # with its launch
    assert rows["first"].seconds == 0
    assert abs(rows["second"].seconds - (2 * PRODUCT - product)) < 1e-9
    assert abs(sum(dict(rows["second"].parts).values()) - rows["second"].seconds) < 1e-12


def test_all_that_is_waited_for_counts_once():
    for seconds in (0.0, PRODUCT / 3, PRODUCT, 5 * PRODUCT):
        rows = timed(seconds)
        whole = sum(row.seconds for row in rows.values())
        assert abs(whole - (max(rows["y"].seconds, 2 * seconds) + seconds)) < 1e-9
