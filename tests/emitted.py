"""What a per-device program says to other devices, read off its jaxpr; see ``gshard.analysis.emitted``."""

from gshard.analysis.emitted import emitted as emitted
from gshard.analysis.emitted import reported as reported
