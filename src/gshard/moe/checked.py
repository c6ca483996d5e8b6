"""Checks a model's configuration: which choices go together, and the errors for those that do not."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Protocol

from gshard.core.errors import GShardError, known_names

CHOICES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "routing": ("paper", "lingvo", "top_k", "expert_choice"),
        "decoder_routing": ("paper", "lingvo", "top_k"),
        "second_expert": ("random", "all"),
        "gates": ("softmax", "sigmoid"),
        "balance": ("loss", "bias"),
        "dispatch": ("einsum", "gather", "blocks", "ragged", "ragged_all_to_all", "two_hops"),
        "activation": ("relu", "swiglu"),
        "positions": ("sinusoidal", "rotary"),
    }
)
_SIZES = ("target_vocabulary", "model_dim", "hidden_dim", "heads", "head_dim", "decoder_layers", "partitions",
    "top_k", "experts_every", "replicas", "hosts")  # fmt: skip


class ModelError(GShardError):
    """A model's configuration is invalid, or does not fit the batch."""


def require(holds: bool, what: str, got: str, hint: str | None = None) -> None:
    """Raises a ``ModelError`` if a condition does not hold."""
    if not holds:
        raise ModelError(what, None, got, hint)


class Choices(Protocol):
    """The attributes of a ``TransformerConfig`` that are checked."""

    @property
    def balance(self) -> str: ...
    @property
    def capacity_factor(self) -> float: ...
    @property
    def data_axis(self) -> str | tuple[str, ...] | None: ...
    @property
    def decoder_routing(self) -> str | None: ...
    @property
    def dense_first(self) -> int: ...
    @property
    def dispatch(self) -> str: ...
    @property
    def has_slots(self) -> bool: ...
    @property
    def encoder_layers(self) -> int: ...
    @property
    def expert_axis(self) -> str | tuple[str, ...] | None: ...
    @property
    def experts(self) -> int: ...
    @property
    def experts_every(self) -> int: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def groups(self) -> int | None: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def normalise_gates(self) -> bool: ...
    @property
    def partitions(self) -> int: ...
    @property
    def positions(self) -> str: ...
    @property
    def remat(self) -> bool | str: ...
    @property
    def replicas(self) -> int: ...
    @property
    def rotary_base(self) -> float: ...
    @property
    def routing(self) -> str: ...
    @property
    def source_vocabulary(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    def capacity(self, tokens_of_group: int) -> int: ...


def check(config: Choices) -> None:
    """Refuses an invalid configuration."""
    for name in _SIZES:
        require(getattr(config, name) >= 1, f"{name} must be at least 1.", f"{name}={getattr(config, name)}")
    for name in ("encoder_layers", "shared_experts", "dense_first", "source_vocabulary"):
        require(getattr(config, name) >= 0, f"{name} must not be negative.", f"{name}={getattr(config, name)}")
    require(
        (config.encoder_layers == 0) == (config.source_vocabulary == 0),
        "an encoder and a source vocabulary come together.",
        f"source_vocabulary={config.source_vocabulary}, encoder_layers={config.encoder_layers}",
        "Use both, or 0 for both: TransformerConfig.decoder_only(vocabulary, layers).",
    )
    for name in ("dropout", "attention_dropout"):
        rate = getattr(config, name)
        require(0.0 <= rate < 1.0, f"{name} must be a rate from 0 up to, not including, 1.", f"{name}={rate}")
    for name, known in CHOICES.items():
        value = getattr(config, name)
        if value is not None or name != "decoder_routing":
            hint = known_names(str(value), known, "Use one of")
            require(value in known, f"{name} {value!r} is not known.", f"{name}={value!r}", hint)
    for name in ("dense_hidden_dim", "kv_heads"):
        value = getattr(config, name)
        require(value is None or value >= 1, f"{name} must be at least 1.", f"{name}={value}")
    require(
        config.remat in (False, True, "branches"),
        f"remat {config.remat!r} is not known.",
        f"remat={config.remat!r}",
        'Use True for pairs of layers, "branches" for each attention and feed-forward by itself, or False.',
    )
    _check_positions(config)
    if config.experts:
        _check_experts(config)
        _check_axes(config)
        _check_routing(config)


def as_axes(axes: Any) -> Any:
    """The names of mesh axes as a tuple, from one name, several, or None."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _check_axes(config: Choices) -> None:
    names: list[str] = []
    for field in ("expert_axis", "data_axis"):
        axes = as_axes(getattr(config, field))
        require(
            isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes),
            f"{field} is a mesh axis, or a tuple of mesh axes.",
            f"{field}={getattr(config, field)!r}",
        )
        names += axes
    require(
        len(set(names)) == len(names),
        "a mesh axis is named twice: each holds parts of the experts or parts of the batch.",
        f"expert_axis={config.expert_axis!r}, data_axis={config.data_axis!r}",
    )
    require(
        config.replicas == 1 or config.data_axis is not None,
        "replicas of the experts have a mesh axis, which splits the batch.",
        f"replicas={config.replicas}, data_axis=None",
        "Name the axis: data_axis='data'.",
    )
    require(
        config.data_axis is None or config.partitions == 1 or config.expert_axis is not None,
        "with a data axis, the marks of the experts name a mesh axis too: a number of partitions does not.",
        f"data_axis={config.data_axis!r}, partitions={config.partitions}, expert_axis=None",
        "Name the axis: expert_axis='expert'.",
    )
    if config.dispatch == "two_hops":
        require(
            config.partitions == 1 or len(as_axes(config.expert_axis)) == 2,
            "two hops go along two mesh axes: between hosts, and inside a host.",
            f"dispatch='two_hops', expert_axis={config.expert_axis!r}",
            "Name both: expert_axis=('host', 'device'), or use dispatch='ragged_all_to_all'.",
        )
        require(
            config.partitions % config.hosts == 0,
            "hosts have as many partitions of the experts as the others.",
            f"partitions={config.partitions}, hosts={config.hosts}",
            "Give the size of the first axis of expert_axis as hosts, and that of both as partitions.",
        )


def _check_positions(config: Choices) -> None:
    kv_heads = config.kv_heads or config.heads
    require(
        config.heads % kv_heads == 0,
        "heads of queries are shared out evenly among those of keys and values.",
        f"heads={config.heads}, kv_heads={kv_heads}",
        "Use a kv_heads that divides heads.",
    )
    if config.positions == "sinusoidal":
        require(
            config.model_dim % 2 == 0, "sinusoidal positions need an even model_dim.", f"model_dim={config.model_dim}"
        )
    else:
        require(config.head_dim % 2 == 0, "rotary positions need an even head_dim.", f"head_dim={config.head_dim}")
        require(config.rotary_base > 0, "rotary_base must be positive.", f"rotary_base={config.rotary_base}")


def _check_experts(config: Choices) -> None:
    require(
        config.experts >= 2,
        "top-2 gating needs at least two experts.",
        f"experts={config.experts}",
        "Use experts=0 for a dense model.",
    )
    every = config.experts_every
    for name in ("encoder_layers", "decoder_layers"):
        layers = getattr(config, name)
        above = layers - config.dense_first
        require(
            layers == 0 or (above > 0 and above % every == 0),
            f"{name} must be {'even' if every == 2 and not config.dense_first else f'a multiple of {every}'}"
            f"{f' above {config.dense_first} dense ones' if config.dense_first else ''}: layers come in "
            f"{'pairs' if every == 2 else f'blocks of {every}'}, one with experts and {every - 1} without.",
            f"{name}={layers}, experts={config.experts}",
            f"Use {config.dense_first + every * max(1, -(-above // every))} layers, or experts=0.",
        )
    require(
        config.dispatch != "blocks" or config.partitions * config.replicas == 1,
        "dispatch 'blocks' reads the weights of one expert after the other and cannot be split over experts"
        " or replicas.",
        f"dispatch='blocks', partitions={config.partitions}, replicas={config.replicas}",
        "Use dispatch='ragged', or 'ragged_all_to_all' or 'gather' with capacity_factor=math.inf, which drop nothing.",
    )
    require(
        config.dispatch not in ("ragged", "ragged_all_to_all", "two_hops") or config.experts % config.partitions == 0,
        f"dispatch {config.dispatch!r} gives each partition as many experts as the others.",
        f"experts={config.experts}, partitions={config.partitions}",
        "Use a number of partitions that divides the experts, or dispatch='gather'.",
    )
    require(
        config.group_size is None or config.group_size >= 1, "a group needs a token.", f"group_size={config.group_size}"
    )
    require(config.groups is None or config.groups >= 1, "a batch needs a group.", f"groups={config.groups}")
    require(
        config.groups is None or config.group_size is None,
        "the groups of a batch are given by their size or by their number.",
        f"group_size={config.group_size}, groups={config.groups}",
        "Give group_size=None with a number of groups.",
    )
    require(
        config.capacity_factor > 0, "capacity_factor must be positive.", f"capacity_factor={config.capacity_factor}"
    )
    if config.group_size is not None and config.has_slots:
        config.capacity(config.group_size)


def _check_routing(config: Choices) -> None:
    decoder = config.decoder_routing or config.routing
    require(
        decoder != "expert_choice",
        "experts that choose among the tokens of a group see later ones: a decoder would see what it is to predict.",
        "routing='expert_choice'",
        "Leave it to the encoder: decoder_routing='top_k'.",
    )
    kinds = {decoder, config.routing} if config.encoder_layers else {decoder}
    for kind in kinds & {"paper", "lingvo"}:
        require(
            config.top_k == 2,
            f"routing {kind!r} sends a token to two experts.",
            f"top_k={config.top_k}",
            "Use routing='top_k'.",
        )
    require(
        config.top_k <= config.experts,
        "a token cannot go to more experts than there are.",
        f"top_k={config.top_k}, experts={config.experts}",
    )
    require(
        config.top_k > 1 or not config.normalise_gates,
        "the weight of a token's only expert would always be 1, and the router would learn nothing.",
        "top_k=1, normalise_gates=True",
        "Use normalise_gates=False.",
    )
    require(
        "expert_choice" not in kinds or config.has_slots,
        f"experts that choose have equal loads: dispatch {config.dispatch!r} has nothing to do.",
        f"routing='expert_choice', dispatch={config.dispatch!r}",
        "Use dispatch='gather'.",
    )
    require(
        "expert_choice" not in kinds or config.balance == "loss",
        "experts that choose are balanced without a bias.",
        "routing='expert_choice', balance='bias'",
        "Leave balance as it is.",
    )
