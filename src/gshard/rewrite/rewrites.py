"""Lists the rewrites in the order in which they run. CONTRIBUTING describes how to add one."""

from __future__ import annotations

from gshard.rewrite.compose_movement import compose_movement
from gshard.rewrite.fft_by_dimension import fft_by_dimension
from gshard.rewrite.fold_into_reader import dots_of_parts, fold_pad_into_window, sum_of_scatter, transpose_of_dot
from gshard.rewrite.shard_scan import shard_scan
from gshard.rewrite.sink_pad import sink_pad
from gshard.rewrite.split_merged_dims import split_merged_dims
from gshard.rewrite.widening import stack_narrow, widen_late, widen_slices

TRACE = (
    sum_of_scatter,
    split_merged_dims,
    sink_pad,
    compose_movement,
    fold_pad_into_window,
    transpose_of_dot,
    dots_of_parts,
    stack_narrow,
    widen_slices,
    widen_late,
)
"""Rewrites that run while a program is traced. They do not depend on the split of values."""

SPLIT = (shard_scan, fft_by_dimension)
"""Rewrites that run after propagation and depend on the split of values. The first one that applies wins."""
