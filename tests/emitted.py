"""What a per-device program says to other devices, read off its jaxpr; see ``gshard.testing.rule_checks``."""

from gshard.testing.rule_checks import emitted as emitted
from gshard.testing.rule_checks import reported as reported
