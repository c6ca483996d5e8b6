"""Devices: refuses more than there are."""

from __future__ import annotations

import jax

from m4.errors import CommandError


def check_devices(count: int) -> None:
    """Refuses a number of devices that is not there.

    Raises:
        CommandError: there are fewer, or none was asked for.
    """
    present = len(jax.devices())
    if not 1 <= count <= present:
        raise CommandError(
            f"cannot use {count} devices.",
            got=f"{present} devices of kind {jax.devices()[0].device_kind!r}",
            hint="Ask with --devices for as many as there are, or fewer.",
        )
