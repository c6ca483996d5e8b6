"""Price: what one equation costs, split in one way, its arrays being sharded as they are."""

from __future__ import annotations

import functools

from gshard.comm.reshard import plan_reshard, reshard_bytes
from gshard.comm.steps import LOCAL
from gshard.core.mesh import Mesh
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, parts, result_sharding
from gshard.passes.candidates import Arrays
from gshard.passes.objective import MESSAGE, OTHER, PRODUCT, is_product


def price(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> float:
    """What each device sends, and what its share of the work counts as, in bytes."""
    work = rule.flops / parts(split, mesh)
    return sent(rule, split, arrays, mesh) + work * (PRODUCT if is_product(rule) else OTHER)


def sent(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> float:
    """Bytes that each device sends to bring operands into place and results to where they belong; messages count."""
    count = len(rule.operands)
    moved = 0.0 if rule.sends is None else float(rule.sends(mesh, split))
    for i, x in enumerate(arrays[:count]):
        if x is not None:
            moved += _moving(x.sharding, operand_sharding(rule, i, split), x.shape, x.itemsize, mesh)
    for i, x in enumerate(arrays[count:]):
        if x is not None:
            moved += _moving(result_sharding(rule, i, split), x.sharding, x.shape, x.itemsize, mesh)
    return moved


@functools.lru_cache(maxsize=65536)
def _moving(source: Sharding, target: Sharding, shape: tuple[int, ...], size: int, mesh: Mesh) -> float:
    if source == target:
        return 0.0
    steps = plan_reshard(source, target, shape, size, mesh)
    messages = sum(step.kind not in LOCAL for step in steps)
    return reshard_bytes(source, target, shape, size, mesh) + MESSAGE * messages
