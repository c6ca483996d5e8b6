"""Devices: refuses more than there are, and says what does not divide among them."""

from __future__ import annotations

import sys

import jax

from gshard_m4.errors import CommandError


def every_device() -> int:
    """The devices to train on if no number is given: all accelerators, or one processor for each process."""
    return jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()


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


def uneven(count: int, what: str, devices: int) -> list[str]:
    """A line if some things do not divide among devices; none otherwise.

    >>> uneven(8, "experts", 6)
    ['8 experts do not divide among 6 devices: a device has up to 2, and a step takes as long as one of 12.']
    """
    if devices == 1 or count % devices == 0:
        return []
    most = -(-count // devices)
    line = f"{count} {what} do not divide among {devices} devices: a device has up to {most}, "
    return [line + f"and a step takes as long as one of {most * devices}."]


def tell_uneven_experts(experts: int, devices: int) -> None:
    """Says on standard error that a search takes longer than it would with another number of devices."""
    for line in uneven(experts, "experts", devices):
        print(f"gshard-m4: {line}", file=sys.stderr)
