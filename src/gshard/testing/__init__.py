"""Testing: what tests of your program can check with gshard.

    gshard.testing.assert_collectives(jax.jit(step), (state, batch), all_gather=0, max_bytes="50MiB")
    gshard.testing.assert_no_more_collectives(jax.jit(step), (state, batch), baseline="tests/step.collectives.txt")
    gshard.testing.assert_proved(sharded_step, (state, batch), like=plain_step)
    gshard.testing.check_rule(f, *args, primitive="my_primitive")
    gshard.testing.check_kernel(my_kernel, *args)

``assert_collectives`` and ``assert_no_more_collectives`` read what XLA compiled, so they need no device but CPUs.
``check_rule`` proves every split of an operator, ``check_kernel`` checks those of a ``gshard.kernel``. The plugin
``gshard_pytest`` has a fixture for the first two.
"""

from gshard.testing.asserted_collectives import assert_collectives as assert_collectives
from gshard.testing.asserted_collectives import assert_no_more_collectives as assert_no_more_collectives
from gshard.testing.rule_checks import assert_proved as assert_proved
from gshard.testing.rule_checks import check_kernel as check_kernel
from gshard.testing.rule_checks import check_rule as check_rule

__all__ = ["assert_collectives", "assert_no_more_collectives", "assert_proved", "check_kernel", "check_rule"]
