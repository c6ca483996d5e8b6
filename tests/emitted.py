"""What a per-device program says to other devices, read off its jaxpr; see ``gshard.device.jaxpr_collectives``."""

from gshard.device.jaxpr_collectives import emitted as emitted
from gshard.device.jaxpr_collectives import reported as reported
