"""The law: an equation run on shards, in every way its rule allows, computes what it computes whole.

``gshard.testing.check_rule`` proves it: each way of splitting is put into a plan by hand, emitted by the partitioner as
in a real program, and run exactly for all devices, padding poisoned and parts of sums random on the way in.
"""

import pytest

from gshard.language.registry import own_rules
from gshard.testing import check_rule
from harness import elementwise, rows
from sampled import sampled_rows

SPLITS = 2  # of each row, drawn with a fixed seed where there are more
SPLITS_ELEMENTWISE = 1  # of rows that differ in the primitive only: one rule serves them all
ROWS = {r.name: r for r in rows()}
ELEMENTWISE = {r.name for r in elementwise()}
FIRST = {r.primitive: r.name for r in reversed(rows())}
# Without an exact value: numbers are compared up to rounding. This list can only get shorter.
UNDECIDED = frozenset(
    """approx_top_k cholesky qr ormqr eigh svd lu triangular_solve tridiagonal_solve gshard_kernel pallas_call
    random_gamma""".split()
) | {"bitcast_convert_type, narrower"}


def the_equation(program, primitive):
    return next((e for e in program.block.walk() if e.name == primitive), None)


@pytest.mark.quick
@pytest.mark.parametrize("name", [r.name for r in sampled_rows(ROWS.values(), "rules_sound")])
@pytest.mark.one_in(3)
def test_every_split_computes_the_whole(name):
    check(ROWS[name], SPLITS_ELEMENTWISE if name in ELEMENTWISE else SPLITS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_very_many_splits_compute_the_whole(name):
    check(ROWS[name], 16)


def check(row, most):
    if the_equation(row.program, row.primitive) is None:
        pytest.skip(f"this JAX has no primitive {row.primitive} here")
    found = check_rule(row.function, *row.arguments, primitive=row.primitive, most=most, tolerance=1e-4)
    is_decided = not any(text.endswith("up to rounding") for text in found)
    assert is_decided or {row.primitive, row.name} & UNDECIDED
    assert not is_decided or row.primitive not in UNDECIDED or row.name != FIRST[row.primitive]


def test_every_rule_has_a_row():
    """A primitive that the table does not reach is named here with the reason."""
    without = {
        "log2", "one_minus_square", "polynomial",  # only in newer JAX; elementwise
        "add_any", "eq_to", "le_to", "lt_to",  # made by JAX itself; elementwise
        "copy_p", "name", "random_gamma_grad", "igamma_grad_a", "polygamma", "regularized_incomplete_beta",
        "shard_map",  # one split only; see tests/rules/test_manual.py
        "enter_manual", "leave_manual", "manual_axis_index", "manual_psum", "manual_pmax", "manual_pmin",
        "manual_ppermute", "manual_all_gather", "manual_psum_scatter", "manual_all_to_all",
        "manual_reduce_scatter",
        "manual_ragged_all_to_all",  # need a mesh; see tests/tracing/test_partly_manual.py
        "custom_partitioning",  # the same; see tests/rules/test_custom_partitioning.py
        "pure_callback", "io_callback", "debug_callback", "debug_print",  # tests/rules/test_callback.py
        "xla_metadata_value",  # elementwise; tests/emit/test_contexts.py
        "platform_index",  # no arrays; see "calls" in tests/emit/test_programs.py
        "sharding_constraint", "device_put",  # need a mesh; see tests/emit/test_programs.py
        "reshard", "layout_constraint",  # the same; see tests/api/test_user_mesh.py, tests/tracing/test_expand.py
        "cholesky_update", "eig", "hessenberg", "householder_product", "lu_pivots_to_permutation", "geqrf", "geqp3",
        "schur", "symmetric_product", "tridiagonal",  # batch dimensions only, as qr
        "stack", "unstack", "split", "tile", "square", "copy", "stop_gradient",  # written otherwise by some JAX
    }  # fmt: skip
    reached = {r.primitive for r in ROWS.values()}
    assert set(own_rules()) - reached - without == set()
