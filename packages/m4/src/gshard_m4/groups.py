"""Groups: how many a batch's tokens are routed in, which decides what an expert has room for, and so the numbers.

The number follows from the batch, or is chosen (``--groups``). It never follows from the devices: a run that goes on
with fewer of them computes what it would have computed with all.

>>> groups_of((104, 24, 32)), groups_of((512, 192, 128)), groups_of((512, 192, 128), accumulate=4)
(8, 64, 16)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from gshard import moe
from gshard_m4 import devices as of_devices
from gshard_m4.config import ModelChoice, TrainConfig, devices_of, on_devices
from gshard_m4.text import PreparedText

_TOKENS = 1024  # of a group, where a batch has more than eight of them; as in the paper
_LEAST = 8


def groups_of(shape: tuple[int, int, int], accumulate: int = 1) -> int:
    """A power of two that divides the tokens of a micro-batch on both sides: groups of about 1,024 tokens, at least 8.

    Args:
        shape: rows of a batch, source and target tokens of a row.
        accumulate: micro-batches of a batch.
    """
    rows, source, target = shape[0] // accumulate, *shape[1:]
    divides = math.gcd(rows * source, rows * target)
    power = divides & -divides
    full = rows * min(source, target) // _TOKENS
    return min(power, max(_LEAST, 1 << max(full.bit_length() - 1, 0)))


def model_for(
    choice: ModelChoice,
    text: PreparedText,
    devices: int,
    options: TrainConfig,
    say: Callable[[str], None] = print,
    like: moe.TransformerConfig | None = None,
    replicas: int = 1,
) -> moe.TransformerConfig:
    """The model that is trained on a corpus; what does not divide among the devices goes to `say`.

    Args:
        choice: which model, and how many groups if that is chosen.
        text: the corpus, whose batches decide on the groups otherwise.
        devices: to partition the model over.
        options: how it is trained.
        say: takes a line for each thing that does not divide.
        like: a model to take instead of the preset; the choice changes its dropout and its groups only.
        replicas: parts of the devices that have all experts each.

    Raises:
        gshard.moe.ModelError: the choice makes no sense, or the groups do not divide the tokens of a batch, or not
            among the replicas.
    """
    batch = text.batch(0)
    (rows, source), target = batch["source"].shape, batch["target"].shape[1]
    given = groups_of((rows, source, target), options.accumulate)
    if like is None:
        model = choice.transformer(text.source_vocabulary, text.target_vocabulary, groups=given)
    else:
        groups = (choice.groups or given) if like.experts else None
        dropout = like.dropout if choice.dropout is None else choice.dropout
        model = dataclasses.replace(like, groups=groups, group_size=None, dropout=dropout)
    model = on_devices(model, devices, replicas)
    if model.experts:
        for length in (source, target):
            model.capacity(model.tokens_of_a_group(rows // options.accumulate * length))
    for line in uneven(model):
        say(line)
    return model


def uneven(model: moe.TransformerConfig) -> list[str]:
    """What does not divide among the devices of a model, a line for each.

    >>> model = moe.TransformerConfig(9, 9, experts=8, group_size=None, groups=8, partitions=6)
    >>> print("".join(uneven(model)[:1]))
    8 experts do not divide among 6 devices: a device has up to 2, and a step takes as long as one of 12.
    """
    if not model.experts:
        return []
    devices = devices_of(model)
    groups = model.groups or devices
    return [
        *of_devices.uneven(model.experts, "experts", model.partitions),
        *of_devices.uneven(groups, "groups of tokens", devices),
    ]
