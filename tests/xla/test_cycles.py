"""Schedules of TPU programs: halves of collectives, what stands between them, and what stops everything."""

from pathlib import Path

from training_files import loaded

SCHEDULES = Path(__file__).resolve().parents[2] / "benchmarks" / "tpu_schedules.py"

# What libtpu writes, shortened: a loop of three rounds with a permutation around a product; an all-gather that two
# products carry on; a reduce-scatter, which is a fusion of an all-reduce; an all-to-all.
TEXT = """HloModule m, is_scheduled=true, replica_count=1, num_partitions=8

%product (p.0: bf16[8,8], p.1: bf16[8,8]) -> bf16[8,8] {
  %p.0 = bf16[8,8]{1,0} parameter(0)
  %p.1 = bf16[8,8]{1,0} parameter(1)
  ROOT %c.0 = bf16[8,8]{1,0} convolution(%p.0, %p.1), dim_labels=bf_io->bf
}

%carried.0 (p.2: bf16[8,8]) -> bf16[64,8] {
  %p.2 = bf16[8,8]{1,0} parameter(0)
  ROOT %g.0 = bf16[64,8]{1,0} all-gather(%p.2), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%carried.1 (p.3: bf16[8,8], p.4: bf16[8,8]) -> bf16[8,8] {
  %p.3 = bf16[8,8]{1,0} parameter(0)
  %p.4 = bf16[8,8]{1,0} parameter(1)
  %g.1 = bf16[64,8]{1,0} all-gather(%p.3), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %c.1 = bf16[8,8]{1,0} convolution(%p.3, %p.4), dim_labels=bf_io->bf
}

%carried.2 (p.5: bf16[8,8]) -> bf16[64,8] {
  %p.5 = bf16[8,8]{1,0} parameter(0)
  ROOT %g.2 = bf16[64,8]{1,0} all-gather(%p.5), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%all-reduce-scatter (p.6: bf16[64,8]) -> bf16[8,8] {
  %p.6 = bf16[64,8]{1,0} parameter(0)
  ROOT %r.0 = bf16[64,8]{1,0} all-reduce(%p.6), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

%body (s: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %s = (s32[], bf16[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[8,8]{1,0} get-tuple-element(%s), index=1
  %cp = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %other = bf16[8,8]{1,0} add(%x, %x), backend_config={"estimated_cycles":"5"}
  %f.0 = bf16[8,8]{1,0} fusion(%other, %x), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"100"}
  %cpd = bf16[8,8]{1,0} collective-permute-done(%cp)
  %after = bf16[8,8]{1,0} add(%cpd, %f.0), backend_config={"estimated_cycles":"7"}
  ROOT %t = (s32[], bf16[8,8]{1,0}) tuple(%i, %after)
}

%end (s.1: (s32[], bf16[8,8])) -> pred[] {
  %s.1 = (s32[], bf16[8,8]{1,0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (a: bf16[8,8], b: bf16[64,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = bf16[64,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %begin = (s32[], bf16[8,8]{1,0}) tuple(%zero, %a)
  %w = (s32[], bf16[8,8]{1,0}) while(%begin), condition=%end, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %async-collective-start = bf16[64,8]{1,0} fusion(%a), kind=kCustom, calls=%carried.0
  %f.1 = bf16[8,8]{1,0} fusion(%a, %a), kind=kOutput, calls=%carried.1, backend_config={"estimated_cycles":"40"}
  %alone = bf16[8,8]{1,0} add(%f.1, %f.1), backend_config={"estimated_cycles":"2"}
  %async-collective-done = bf16[64,8]{1,0} fusion(%a), kind=kCustom, calls=%carried.2
  %rs = bf16[8,8]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter
  ROOT %a2a = bf16[8,8]{1,0} all-to-all(%rs), channel_id=5, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}
"""
EVERYBODY = tuple(range(8))


def test_what_stands_between_the_halves():
    schedules = loaded(SCHEDULES, "tpu_schedules")
    schedule, scheduled = schedules.schedule, schedules.Scheduled
    part = 8 * 8 * 2
    assert schedule(TEXT) == (
        scheduled("all_gather", 7 * part, 1, True, 42, 1, EVERYBODY),
        scheduled("reduce_scatter", 7 * part, 1, False, 0, 0, EVERYBODY),
        scheduled("all_to_all", part // 2, 1, False, 0, 0, (0, 1)),
        scheduled("collective_permute", part, 3, True, 105, 1),
    )
    assert schedules.estimated_cycles(TEXT) == 3 * 112 + 42
    assert [x.total_sent for x in schedule(TEXT)] == [7 * part, 7 * part, part // 2, 3 * part]
    assert schedule("") == schedule("HloModule empty") == ()
