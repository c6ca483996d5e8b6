"""What is read from compiled programs, against programs whose collectives are known."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.xla.hlo_collectives import collectives, collectives_of, summary
from gshard.xla.hlo_parser import read_module, trip_count


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


def compiled_text(function, mesh, *args):
    whole = PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(mapped).lower(*args).compile().as_text()


def without_trip_counts(text):
    return re.sub(r", backend_config=.*", "", text)


def facts(c):
    return c.kind, c.group_size, c.operand_bytes, c.bytes_moved, c.executions, c.exact


X = jax.ShapeDtypeStruct((8, 8), jnp.float32)  # 256 bytes


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: lax.psum(x, "a"), ("all_reduce", 2, 256, 256, 1, True)),
        (lambda x: lax.psum(x, "b"), ("all_reduce", 4, 256, 384, 1, True)),
        (lambda x: lax.pmax(x, ("b", "a")), ("all_reduce", 8, 256, 448, 1, True)),
        (lambda x: lax.all_gather(x, "b", tiled=True), ("all_gather", 4, 256, 768, 1, True)),
        (lambda x: lax.all_gather(x, ("b", "a")), ("all_gather", 8, 256, 1792, 1, True)),
        (lambda x: lax.psum_scatter(x, "b", tiled=True), ("reduce_scatter", 4, 256, 192, 1, True)),
        (lambda x: lax.all_to_all(x, "b", 0, 1, tiled=True), ("all_to_all", 4, 256, 192, 1, True)),
        (lambda x: lax.all_to_all(x, ("a", "b"), 1, 0, tiled=True), ("all_to_all", 8, 256, 224, 1, True)),
        (lambda x: lax.ppermute(x, "a", [(0, 1), (1, 0)]), ("collective_permute", 8, 256, 256, 1, True)),
        (lambda x: lax.ppermute(x, "a", [(0, 0), (1, 1)]), ("collective_permute", 8, 256, 0, 1, True)),
        (
            lambda x: lax.psum(x, ("a", "b"), axis_index_groups=[[0, 5], [1, 2], [3, 4], [6, 7]]),
            ("all_reduce", 2, 256, 256, 1, True),
        ),
        (lambda x: lax.psum(x.astype(jnp.int8), "b"), ("all_reduce", 4, 64, 96, 1, True)),
    ],
)
def test_each_collective(function, expected, mesh):
    module = read_module(compiled_text(function, mesh, X))
    (found,) = collectives_of(module)
    assert facts(found) == expected
    assert re.fullmatch(r"test_hlo_parser.py:\d+", module.line_of(found.itself))


def test_combined_collectives_count_all_their_operands_and_tables_are_sorted_by_bytes(mesh):
    found = collectives(compiled_text(lambda x: [lax.psum(x, "b"), lax.psum(jnp.sin(x)[:3], "b")], mesh, X))
    assert summary(found) == {"all_reduce": (len(found), 2 * (256 + 96) * 3 // 4)}


def scanned(x):
    return lax.scan(lambda c, _: (lax.psum(jnp.sin(c), "b"), None), x, length=5)[0]


def nested(x):
    def outer(c, row):
        c, _ = lax.scan(lambda c, _: (lax.psum(jnp.sin(c), "b"), None), c + row, length=3)
        return lax.all_gather(c, "a").sum(0), lax.ppermute(row, "a", [(0, 1)])

    return lax.scan(outer, x, x[:, None, :])


def counted(x):
    return lax.fori_loop(2, 9, lambda i, c: lax.psum(jnp.sin(c), "b") * i, x)


@pytest.mark.parametrize("read", [lambda text: text, without_trip_counts], ids=["noted", "derived"])
@pytest.mark.parametrize(("function", "expected"), [
    (scanned, {"all_reduce": (5, 5 * 384)}), (counted, {"all_reduce": (7, 7 * 384)}),
    (nested, {"all_gather": (8, 8 * 256), "all_reduce": (24, 24 * 384), "collective_permute": (8, 8 * 32)}),
])  # fmt: skip
def test_loops_multiply(read, function, expected, mesh):
    text = read(compiled_text(function, mesh, X))
    found = collectives(text)
    assert summary(found) == expected
    assert all(c.exact for c in found)


def test_what_depends_on_data_is_marked(mesh):
    def function(x, n):
        branch = lax.cond(n > 0, lambda x: lax.psum(x, "a"), lambda x: lax.all_gather(x, "b").sum(0), x)
        loop = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, lax.pmax(jnp.sin(c[1]), "a")), (0, x))
        return branch, loop, lax.psum(x[:1], "b")

    found = collectives(compiled_text(function, mesh, X, jax.ShapeDtypeStruct((), jnp.int32)))
    assert sorted((c.kind, c.group_size, c.executions, c.exact) for c in found) == [
        ("all_gather", 4, 1, False),
        ("all_reduce", 2, 1, False),
        ("all_reduce", 2, 1, False),
        ("all_reduce", 4, 1, True),
    ]


def test_program_partitioned_by_xla(mesh):
    split = [NamedSharding(mesh, PartitionSpec("a", "b")), NamedSharding(mesh, PartitionSpec("b", None))]
    result = NamedSharding(mesh, PartitionSpec("a", None))
    y = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    text = jax.jit(lambda x, y: x @ y, in_shardings=split, out_shardings=result).lower(X, y).compile().as_text()
    (found,) = collectives(text)
    assert facts(found) == ("all_reduce", 4, 4 * 16 * 4, 2 * 256 * 3 // 4, 1, True)


# What compilers for accelerators print and the CPU's never does.
ASYNCHRONOUS = """\
HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8

%wrapped (p: f32[8,8]) -> f32[2,8] {
  %p = f32[8,8]{1,0:T(8,128)} parameter(0)
  ROOT %rs = f32[2,8]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, \
to_apply=%add
}

ENTRY %main (x: f32[8,8], y: bf16[16]) -> f32[32,8] {
  %x = f32[8,8]{1,0:T(8,128)} parameter(0)
  %y = bf16[16]{0} parameter(1)
  %ag = ((f32[8,8]{1,0}, bf16[16]{0}), (f32[32,8]{1,0}, /*index=1*/bf16[64]{0})) \
all-gather-start(%x, %y), replica_groups=[2,4]<=[8], dimensions={0}, \
metadata={op_name="f" source_file="/elsewhere/train.py" source_line=41}
  %agd = (f32[32,8]{1,0}, bf16[64]{0}) all-gather-done(%ag)
  %cp = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %cpd = f32[8,8]{1,0} collective-permute-done(%cp)
  %as = ((f32[8,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%x), calls=%wrapped
  %ad = f32[2,8]{1,0} async-done(%as)
  %ar = f32[8,8]{1,0} all-reduce-start(%x), replica_groups={}, to_apply=%add
  ROOT %ard = f32[8,8]{1,0} all-reduce-done(%ar)
}
"""


@pytest.mark.parametrize("text", [
    ASYNCHRONOUS, ASYNCHRONOUS.replace("async-start(%x), calls=", "call-start(%x), to_apply="),  # as on TPU7x
])  # fmt: skip
def test_asynchronous_pairs_count_once(text):
    found = collectives(text)
    assert [facts(c) for c in found] == [
        ("all_gather", 4, 288, 864, 1, True),
        ("collective_permute", 8, 256, 256, 1, True),
        ("reduce_scatter", 4, 256, 192, 1, True),
        ("all_reduce", 8, 256, 448, 1, True),
    ]
    assert read_module(text).line_of(found[0].made) == "train.py:41"


@pytest.mark.parametrize(("header", "attributes", "groups"), [
    ("num_partitions=8", "replica_groups={{7,6,5,4,3,2,1,0}}, use_global_device_ids=true", "01234567"),
    ("num_partitions=8", "replica_groups={{0},{3,2,1},{4,5,6,7}}, channel_id=1", "0 123 4567"),
    ("num_partitions=8", "replica_groups={}", "01234567"), ("num_partitions=8", "dimensions={0}", "01234567"),
    ("num_partitions=8", "channel_id=1, replica_groups={{0}}", "01234567"),
    ("num_partitions=8", "replica_groups={{0}}", "0 1 2 3 4 5 6 7"),
    ("replica_count=8", "replica_groups={{0,4},{1,5},{2,6},{3,7}}", "04 15 26 37"),
    ("replica_count=2, num_partitions=4", "replica_groups={{0,1}}", "04 15 26 37"),
    ("replica_count=2, num_partitions=4", "channel_id=1, replica_groups={{0},{1}}", "0123 4567"),
    ("num_partitions=8", "replica_groups=mesh['a'=2,'b'=4] {}, use_global_device_ids=true", "0 1 2 3 4 5 6 7"),
    ("num_partitions=8", "replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}, channel_id=1", "0145 2367"),
    ("num_partitions=8", "replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}", "04 15 26 37"),
])  # fmt: skip
def test_groups_by_replicas_partitions_and_channels(header, attributes, groups):
    """With replicas, ``replica_groups`` counts these; a channel joins the partitions of a replica."""
    text = f"HloModule f, {header}\n\nENTRY %f (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n"
    (found,) = collectives(f"{text}  ROOT %y = f32[8] all-reduce(%x), {attributes}, to_apply=%add\n}}\n")
    assert {"".join(map(str, group)) for group in found.groups} == set(groups.split())
    assert found.group_size == max(map(len, groups.split()))


def test_any_groups_are_read_back(rng):
    """Axes and parts of axes of a mesh in any order of devices, in each notation in which XLA writes their groups."""
    for _ in range(200):
        sizes = rng.choice([1, 2, 3, 4, 6], rng.integers(1, 4))
        order = np.arange(sizes.prod())
        turned, permutation = rng.permutation(sizes), rng.permutation(len(sizes))
        ids, written = [
            (order, ""),
            (rng.permutation(order), None),
            (order.reshape(turned).transpose(permutation).ravel(), f"[{listed(turned)}]T({listed(permutation)})"),
        ][rng.integers(3)]
        written = listed(ids) if written is None else written
        # Each axis is a part before, a part that communicates or none, and a part after.
        pairs = [[(b, p) for b, p in np.ndindex(7, 7) if b and p and n % (b * p) == 0] for n in sizes]
        parts = [rng.permutation(of_axis)[0] for of_axis in pairs]
        fine = [
            size for n, (before, part) in zip(sizes, parts, strict=True) for size in (before, part, n // before // part)
        ]
        over = rng.permutation(len(sizes))
        inside = [3 * k + 1 for k in over]
        outside = [d for d in range(len(fine)) if d not in inside]
        groups = ids.reshape(fine).transpose(outside + inside).reshape(-1, math.prod(fine[d] for d in inside))
        mesh = ",".join(f"'a{k}'={n}" for k, n in enumerate(sizes))
        axes = ",".join(
            f"'a{k}'" if parts[k][1] == sizes[k] else f"'a{k}':({parts[k][0]}){parts[k][1]}"
            for k in over
            if parts[k][1] > 1
        )
        notations = ["{" + ",".join("{" + listed(group) + "}" for group in groups) + "}"]
        notations += [f"mesh[{mesh}]{written and f', device_ids=({written})'} {{{axes}}}"]
        if not written:
            turn = listed(outside + inside)
            notations += [f"[{groups.shape[0]},{groups.shape[1]}]<=[{listed(fine)}]T({turn})"]
        for notation in notations:
            text = ASYNCHRONOUS.replace("replica_groups={}", f"replica_groups={notation}, use_global_device_ids=true")
            assert {*collectives(text)[-1].groups} == {*map(tuple, np.sort(groups).tolist())}, notation
    with pytest.raises(ValueError, match="groups of a collective cannot be read: replica_groups=ring"):
        collectives(ASYNCHRONOUS.replace("replica_groups={}", "replica_groups=ring(8)"))


def listed(numbers):
    return ",".join(map(str, numbers))


LOOP = """\
HloModule jit_f, num_partitions=8

%body (s: (s32[], f32[2])) -> (s32[], f32[2]) {
  %s = (s32[], f32[2]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %by = s32[] constant(BY)
  %next = s32[] add(%i, %by)
  %v = f32[2]{0} get-tuple-element(%s), index=1
  ROOT %t = (s32[], f32[2]{0}) tuple(%next, %v)
}

%condition (s.1: (s32[], f32[2])) -> pred[] {
  %s.1 = (s32[], f32[2]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %c = pred[] compare(OPERANDS), direction=DIRECTION
}

ENTRY %main (x: f32[2]) -> (s32[], f32[2]) {
  %x = f32[2]{0} parameter(0)
  %zero = s32[] constant(FROM)
  %start = (s32[], f32[2]{0}) tuple(%zero, %x)
  ROOT %w = (s32[], f32[2]{0}) while(%start), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(("start", "direction", "limit", "by", "count"), [
    (0, "LT", 5, 1, 5), (0, "LE", 5, 1, 6), (3, "LT", 10, 3, 3), (5, "GT", 0, -1, 5), (5, "GE", 0, -2, 3),
    (1, "NE", 9, 2, 4), (1, "NE", 9, 3, None), (7, "LT", 5, 1, 0), (0, "LT", 5, -1, None), (0, "LT", 5, 0, None),
])  # fmt: skip
def test_trip_counts(start, direction, limit, by, count):
    turned = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction]
    for operands, way in (("%i.1, %limit", direction), ("%limit, %i.1", turned)):
        text = LOOP.replace("FROM", str(start)).replace("DIRECTION", way).replace("LIMIT", str(limit))
        module = read_module(text.replace("BY", str(by)).replace("OPERANDS", operands))
        main = module.computations["main"]
        assert trip_count(module, main, main.instructions["w"]) == count


LAYER = """
import jax.numpy as jnp

def layer(x):
    return called(x)

def called(x):
    return jnp.tanh(x)
"""


def lines_of(frames):
    return [f"{path.rpartition('/')[2]}:{line}" for path, line, _ in frames]


def test_the_line_outside_of_libraries_is_named(tmp_path):
    """Of the lines of a stack the innermost one that no library has; of one in a library alone the innermost one."""
    found = {}
    for folder in "site-packages/flax", "project":
        (tmp_path / folder).mkdir(parents=True)
        path = tmp_path / folder / "layers.py"
        path.write_text(LAYER)
        exec(compile(LAYER, str(path), "exec"), made := {})
        text = jax.jit(lambda x, layer=made["layer"]: layer(x) + 1).lower(X).compile().as_text()
        frames = read_module(text).frames
        found[folder] = {lines_of(frames[int(i)])[0] for i in re.findall(r"stack_frame_id=(\d+)", text)}
    line = test_the_line_outside_of_libraries_is_named.__code__.co_firstlineno + 8
    assert found["site-packages/flax"] == {f"test_hlo_parser.py:{line}"}
    assert found["project"] == {f"test_hlo_parser.py:{line}", "layers.py:8"}
    text = """HloModule m, is_scheduled=true

FileNames
1 "/env/site-packages/flax/layers.py"
2 "/elsewhere/train.py"

FileLocations
1 {file_name_id=2 function_name_id=1 line=3 end_line=3}
2 {file_name_id=1 function_name_id=1 line=5 end_line=5}

StackFrames
1 {file_location_id=1 parent_frame_id=PARENTS0}
2 {file_location_id=2 parent_frame_id=PARENTS1}
3 {file_location_id=2 parent_frame_id=PARENTS0}
"""
    for none, first in (1, 2), (0, 1):  # as XLA prints parents, and as it would without adding one
        module = read_module(text.replace("PARENTS0", str(none)).replace("PARENTS1", str(first)))
        assert list(map(lines_of, module.frames.values())) == [["train.py:3"], ["train.py:3"], ["layers.py:5"]]
