"""Configurations: which model, how it is trained, and where things lie.

Models are named as in Table 1 of the GShard paper, scaled down: ``moe-8e-12l`` has 8 experts in every other layer and
12 layers, half of them in the encoder and half in the decoder. ``dense-`` models have none.

>>> model = ModelChoice("moe-8e-4l", experts=16).transformer(8000, 4000, partitions=4)
>>> model.experts, model.encoder_layers, model.decoder_layers, model.partitions
(16, 2, 2, 4)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from gshard import moe
from gshard_m4.errors import OptionError
from gshard_m4.optimizer import Adafactor

PresetName = Literal[
    "demo", "dense-4l", "dense-4l-wide", "moe-8e-4l", "moe-32e-4l", "bilingual-4l",
    "dense-12l", "dense-12l-wide", "dense-24l",
    "moe-8e-12l", "moe-32e-12l", "moe-128e-12l", "moe-8e-24l", "moe-32e-24l",
    "paper-t-96l", "paper-moe-128e-12l", "paper-moe-128e-36l", "paper-moe-512e-12l", "paper-moe-512e-36l",
    "paper-moe-2048e-12l", "paper-moe-2048e-36l", "paper-moe-2048e-60l",
]  # fmt: skip

_SMALL: dict[str, Any] = {
    "model_dim": 256,
    "hidden_dim": 1024,
    "heads": 4,
    "head_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
_BASE: dict[str, Any] = {
    "model_dim": 512,
    "hidden_dim": 2048,
    "heads": 8,
    "head_dim": 64,
    "encoder_layers": 6,
    "decoder_layers": 6,
}

_DEEP: dict[str, Any] = {"encoder_layers": 12, "decoder_layers": 12}


PLACE = ("partitions", "expert_axis", "data_axis", "replicas")
"""The fields of a model that say over which devices it is partitioned."""


def on_devices(model: moe.TransformerConfig, devices: int, replicas: int = 1) -> moe.TransformerConfig:
    """The same model on some devices.

    Args:
        model: the model.
        devices: all devices.
        replicas: the parts into which the devices are divided. Each part has all experts and its share of the batch.

    Raises:
        gshard.moe.ModelError: the devices do not divide into so many replicas, or the model has no experts.

    >>> model = on_devices(moe.TransformerConfig(9, 9, experts=4, group_size=None, groups=8), 8, replicas=2)
    >>> model.partitions, mesh_of(model), mesh_of(on_devices(model, 4))
    (4, {'data': 2, 'expert': 4}, 4)
    """
    if replicas < 1 or devices % replicas:
        raise moe.ModelError(
            "the devices cannot be divided into so many replicas of the experts.",
            got=f"{devices} devices, {replicas} replicas",
            hint="Give --replicas a divisor of the number of devices.",
        )
    if replicas > 1 and not model.experts:
        raise moe.ModelError(
            "this model has no experts to replicate. Its batch is already split over all devices.",
            got=f"--replicas {replicas}",
            hint="Leave out --replicas.",
        )
    partitions = devices // replicas
    data, expert = ("data" if replicas > 1 else None), ("expert" if min(partitions, replicas) > 1 else None)
    return dataclasses.replace(model, partitions=partitions, replicas=replicas, data_axis=data, expert_axis=expert)


def mesh_of(model: moe.TransformerConfig) -> int | dict[str, int]:
    """The devices of a model: their number, or the sizes of the axes if it has replicas."""
    if model.replicas == 1:
        return model.partitions
    return {"data": model.replicas} | ({"expert": model.partitions} if model.partitions > 1 else {})


def devices_of(model: moe.TransformerConfig) -> int:
    """The number of a model's devices."""
    return model.partitions * model.replicas


def _paper_name(name: str) -> str:
    """``MoE(2048E, 36L)`` -> ``paper-moe-2048e-36l``."""
    return "paper-" + name.lower().replace("(", "-").replace(", ", "-").rstrip(")")


def _differences(model: moe.TransformerConfig) -> dict[str, Any]:
    """Everything of a model that is not its vocabularies or its place."""
    left_out = {"source_vocabulary", "target_vocabulary", "group_size", "groups", *PLACE}
    return {name: value for name, value in dataclasses.asdict(model).items() if name not in left_out}


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "demo": _SMALL
        | {"model_dim": 128, "hidden_dim": 256, "heads": 4, "head_dim": 32, "experts": 8, "dropout": 0.0},
        "moe-8e-4l": _SMALL | {"experts": 8},
        "moe-32e-4l": _SMALL | {"experts": 32},
        "dense-4l": _SMALL,
        # Two experts for a token in every other layer take the FLOPs of half as much again in every layer.
        "dense-4l-wide": _SMALL | {"hidden_dim": 1536},
        # For one language: less to fit, and less to fit it with.
        "bilingual-4l": _SMALL | {"model_dim": 128, "hidden_dim": 512, "head_dim": 32, "dropout": 0.2},
        "dense-12l": _BASE,
        "dense-12l-wide": _BASE | {"hidden_dim": 3072},
        "dense-24l": _BASE | _DEEP,
        "moe-8e-12l": _BASE | {"experts": 8},
        "moe-32e-12l": _BASE | {"experts": 32},
        "moe-128e-12l": _BASE | {"experts": 128},
        "moe-8e-24l": _BASE | _DEEP | {"experts": 8},
        "moe-32e-24l": _BASE | _DEEP | {"experts": 32},
    }
    | {_paper_name(name): _differences(model) for name, model in moe.TABLE_1.items()}
)
"""What each model is made of, beside its vocabularies. ``gshard-m4 train --plan`` plans the paper's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelChoice:
    """A preset, and what is to differ from it.

    Attributes:
        preset: name of the model; see `PRESETS`.
        experts: experts of each MoE layer; 0 for a dense model.
        layers: layers of encoder and decoder together, half of them each.
        model_dim: width of the stream between the layers (M in the paper).
        hidden_dim: width of an expert or feed-forward layer (H in the paper).
        dropout: rate for embeddings and residual branches.
        capacity_factor: slots of all experts together for each token; the paper has 2.
        groups: groups that the tokens of a batch (or micro-batch) are routed in; each has its own slots. By default as
            many as have about 1,024 tokens, at least 8: they follow the batch, never the devices.
        routing: ``paper`` is Algorithm 1 to the letter, ``lingvo`` what produced the paper's numbers.
        dispatch: how tokens get to their experts: ``gather`` by index tables, ``einsum`` by one-hot matrices.
        dtype: dtype of activations: float32 or bfloat16.
    """

    preset: PresetName = "demo"
    experts: int | None = None
    layers: int | None = None
    model_dim: int | None = None
    hidden_dim: int | None = None
    dropout: float | None = None
    capacity_factor: float | None = None
    groups: int | None = None
    routing: Literal["paper", "lingvo"] | None = None
    dispatch: Literal["gather", "einsum"] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None

    def transformer(
        self, source_vocabulary: int, target_vocabulary: int, partitions: int = 1, groups: int | None = None
    ) -> moe.TransformerConfig:
        """The model for vocabularies of these sizes.

        Args:
            source_vocabulary, target_vocabulary: number of ids.
            partitions: devices to partition it over.
            groups: of tokens, where this choice names no number; None takes one for each partition.

        Raises:
            gshard.moe.ModelError: the choice makes no sense, such as one expert, or an odd number of layers.
        """
        chosen = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        settings = {**PRESETS[chosen.pop("preset")], "group_size": None, "groups": groups, "partitions": partitions}
        if "layers" in chosen:
            layers = chosen.pop("layers")
            settings |= {"encoder_layers": layers - layers // 2, "decoder_layers": layers // 2}
        settings |= chosen
        if not settings.get("experts"):
            settings["groups"] = None  # nothing is routed
        return moe.TransformerConfig(source_vocabulary, target_vocabulary, **settings)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a model is trained.

    Attributes:
        steps: number of updates.
        seed: of the initial weights, dropout and the coins of the second expert.
        label_smoothing: share of the probability spread evenly over the vocabulary.
        learning_rate: factor of the learning rate; 1 in the paper.
        warmup_steps: steps of linear growth of the learning rate; 0 in the paper.
        cooldown_steps: steps before the last one in which the learning rate falls linearly, to nothing; 0 in the paper.
            A run that is to go on for longer needs none.
        peak_step: step until which the learning rate is flat, and from which it falls as 1/sqrt(step). The flat rate is
            ``learning_rate / sqrt(peak_step)``, relative to the size of each parameter. The paper has 10000.
        log_every: steps between lines of progress where there is no terminal to draw a bar on.
        evaluate_every: steps between measurements on held-out text; 0 measures before and after only.
        save_every: steps between checkpoints; 0 saves at the end only; if not given, the time decides (save_minutes).
        save_minutes: minutes between checkpoints where save_every is not given.
        keep: number of newest checkpoints that are kept, beside the one with the best held-out cross entropy.
        accumulate: micro-batches that each batch is computed in, one after the other, to save memory.
        memory_limit: what a device may hold in a step, such as 14GiB; what does not fit is recomputed in the
            backward pass. None keeps everything.
        search: whether the plan of a step is searched (``gshard.search``), the marks of the MoE layers kept.
        skip_limit: steps whose loss or gradient is not finite are skipped; the run stops after this many.
        tensorboard: whether metrics are also written for TensorBoard.
    """

    steps: int = 1000
    seed: int = 0
    label_smoothing: float = 0.1
    learning_rate: float = 1.0
    warmup_steps: int = 100
    cooldown_steps: int = 0
    peak_step: int = 400
    log_every: int = 50
    evaluate_every: int = 0
    save_every: int | None = None
    save_minutes: float = 5.0
    keep: int = 2
    accumulate: int = 1
    memory_limit: str | None = None
    search: bool = False
    skip_limit: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "peak_step", "log_every", "keep", "accumulate"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "cooldown_steps", "evaluate_every", "save_every", "skip_limit"):
            if (getattr(self, name) or 0) < 0:
                raise OptionError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.save_minutes > 0.0:
            raise OptionError(f"save_minutes must be positive, got {self.save_minutes}")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise OptionError(f"label_smoothing must be from 0 up to, not including, 1, got {self.label_smoothing}")
        if not self.learning_rate > 0.0:
            raise OptionError(f"learning_rate must be positive, got {self.learning_rate}")

    @property
    def optimizer(self) -> Adafactor:
        """The optimizer's constants."""
        return Adafactor(
            scale=self.learning_rate, peak_step=self.peak_step, warmup_steps=self.warmup_steps, steps=self.steps,
            cooldown_steps=self.cooldown_steps,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The folder of one training run, and what lies where in it."""

    directory: Path

    @property
    def checkpoints(self) -> Path:
        """Saved steps."""
        return self.directory / "checkpoints"

    @property
    def corpus(self) -> Path:
        """Says where the corpus is that the run was trained on."""
        return self.directory / "corpus.json"

    @property
    def metrics(self) -> Path:
        """One line of JSON for each step."""
        return self.directory / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """TensorBoard's files."""
        return self.directory / "tensorboard"

    @property
    def skipped(self) -> Path:
        """The batches of steps that were skipped."""
        return self.directory / "skipped"

    @property
    def lock(self) -> Path:
        """Held by the process that trains here."""
        return self.directory / "lock"
