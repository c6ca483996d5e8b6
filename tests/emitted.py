"""What a per-device program says to other devices, read off its jaxpr; see ``gshard.testing.rule_checks``."""

from gshard.testing.rule_checks import emitted as emitted
from gshard.testing.rule_checks import reported as reported


def summary(found):
    """How many collectives of each kind a device runs in one call of a compiled program, and the bytes it sends."""
    totals = {}
    for c in found:
        count, size = totals.get(c.kind, (0, 0))
        totals[c.kind] = (count + c.executions, size + c.total_bytes)
    return dict(sorted(totals.items()))
