"""What a per-device program says to other devices, read off its jaxpr; see ``gshard.analysis.jaxpr_collectives``."""

from gshard.analysis.jaxpr_collectives import emitted as emitted
from gshard.analysis.jaxpr_collectives import reported as reported
