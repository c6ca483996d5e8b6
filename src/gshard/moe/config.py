"""TransformerConfig: all choices of a model in one frozen value, with checks that they fit together."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from gshard.core.errors import GShardError, known_names
from gshard.core.number_text import significant

# Checks a model's configuration: which choices go together, and the errors for those that do not.

_CHOICES: dict[str, tuple[str | bool, ...]] = {
    "routing": ("paper", "lingvo", "top_k"),
    "gates": ("softmax", "sigmoid"),
    "balance": ("loss", "bias"),
    "dispatch": ("einsum", "gather", "blocks", "ragged_all_to_all"),
    "activation": ("relu", "swiglu"),
    "positions": ("sinusoidal", "rotary"),
    "remat": (False, True, "branches"),
}
_SIZES = ("target_vocabulary", "model_dim", "hidden_dim", "heads", "head_dim", "decoder_layers", "partitions",
    "top_k", "experts_every", "replicas", "dense_hidden_dim", "kv_heads", "group_size", "groups")  # fmt: skip


class ModelError(GShardError):
    """A model's configuration is invalid, or does not fit the batch."""


def require(holds: bool, what: str, got: str, hint: str | None = None) -> None:
    """Raises a ``ModelError`` if a condition does not hold."""
    if not holds:
        raise ModelError(what, None, got, hint)


def check(config: TransformerConfig) -> None:
    """Refuses an invalid configuration."""
    for name in _SIZES:
        size = getattr(config, name)
        require(size is None or size >= 1, f"{name} must be at least 1.", f"{name}={size}")
    for name in ("encoder_layers", "shared_experts", "dense_first", "source_vocabulary"):
        require(getattr(config, name) >= 0, f"{name} must not be negative.", f"{name}={getattr(config, name)}")
    for name in ("rotary_base", "capacity_factor"):
        require(getattr(config, name) > 0, f"{name} must be positive.", f"{name}={getattr(config, name)}")
    for name in ("dropout", "attention_dropout"):
        rate = getattr(config, name)
        require(0.0 <= rate < 1.0, f"{name} must be a rate from 0 up to, not including, 1.", f"{name}={rate}")
    for name, known in _CHOICES.items():
        value = getattr(config, name)
        hint = known_names(str(value), list(map(str, known)), "Use one of")
        require(value in known, f"{name} {value!r} is not known.", f"{name}={value!r}", hint)
    require(
        (config.encoder_layers == 0) == (config.source_vocabulary == 0),
        "an encoder and a source vocabulary come together.",
        f"source_vocabulary={config.source_vocabulary}, encoder_layers={config.encoder_layers}",
        "Use both, or 0 for both: TransformerConfig.decoder_only(vocabulary, layers).",
    )
    require(
        config.heads % (config.kv_heads or config.heads) == 0,
        "heads of queries are shared out evenly among those of keys and values.",
        f"heads={config.heads}, kv_heads={config.kv_heads}",
        "Use a kv_heads that divides heads.",
    )
    halved = "model_dim" if config.positions == "sinusoidal" else "head_dim"
    size = getattr(config, halved)
    require(size % 2 == 0, f"{config.positions} positions need an even {halved}.", f"{halved}={size}")
    if config.experts:
        _check_experts(config)
        _check_axes(config)
        _check_routing(config)


def as_axes(axes: Any) -> Any:
    """The names of mesh axes as a tuple, from one name, several, or None."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _check_axes(config: TransformerConfig) -> None:
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


def _check_experts(config: TransformerConfig) -> None:
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
        more = f" above {config.dense_first} dense ones" if config.dense_first else ""
        require(
            layers == 0 or (above > 0 and above % every == 0),
            f"{name} must be a multiple of {every}{more}: layers come "
            f"in blocks of {every}, one with experts and {every - 1} without.",
            f"{name}={layers}, experts={config.experts}",
            f"Use {config.dense_first + every * max(1, -(-above // every))} layers, or experts=0.",
        )
    require(
        config.dispatch != "blocks" or config.partitions * config.replicas == 1,
        "dispatch 'blocks' reads the weights of one expert after the other and cannot be split over experts"
        " or replicas.",
        f"dispatch='blocks', partitions={config.partitions}, replicas={config.replicas}",
        "Use dispatch='ragged_all_to_all' or 'gather' with capacity_factor=math.inf, which drop nothing.",
    )
    require(
        config.dispatch != "ragged_all_to_all" or config.experts % config.partitions == 0,
        f"dispatch {config.dispatch!r} gives each partition as many experts as the others.",
        f"experts={config.experts}, partitions={config.partitions}",
        "Use a number of partitions that divides the experts, or dispatch='gather'.",
    )
    require(
        config.groups is None or config.group_size is None,
        "the groups of a batch are given by their size or by their number.",
        f"group_size={config.group_size}, groups={config.groups}",
        "Give group_size=None with a number of groups.",
    )
    if config.group_size is not None and config.has_slots:
        config.capacity(config.group_size)


def _check_routing(config: TransformerConfig) -> None:
    require(
        config.routing == "top_k" or config.top_k == 2,
        f"routing {config.routing!r} sends a token to two experts.",
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


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A Transformer in which some feed-forwards may be a Mixture of Experts; by default the paper's.

    That is an encoder and a decoder, with experts in every other layer. ``decoder_only`` is the other common form.

    Attributes:
        source_vocabulary, target_vocabulary: number of ids; id 0 is padding and the decoder's first input.
        model_dim, hidden_dim, heads, head_dim: M, H, N and D.
        encoder_layers, decoder_layers: layers of each stack (the paper's 36L is 18 and 18). Without encoder layers
            there is a decoder alone, and ``source_vocabulary`` is 0.
        experts: E; 0 makes a dense model.
        group_size: S, the tokens that are routed together; it must divide batch times length. None cuts a batch into
            ``groups``.
        groups: G where no size is given; it must divide batch times length. None takes one group for each partition of
            each replica, so that what a group has room for depends on the number of devices.
        capacity_factor: C = floor(capacity_factor * S / E) slots for each expert and group, never more than S
            (which drops nothing, as does ``math.inf``). The paper's C = 2S/E is 2.0. With k experts a token, k is
            just enough for an even load.
        routing: ``paper`` is Algorithm 1 as printed, where a second choice that the coin rejects still uses up its
            slot; ``lingvo`` throws the coin before slots are counted, as did the code behind the paper's numbers. Both
            send a token to its second expert with probability 2*g2. ``top_k`` sends it to any number of them without a
            coin.
        dispatch: ``einsum`` (one-hot matrices, Algorithm 2) and ``gather`` (index tables) have slots for each expert.
            ``blocks`` (small products one after the other; for one partition) drops nothing.
            ``ragged_all_to_all`` sends tokens to the partitions of their experts, and multiplies them by
            ``jax.lax.ragged_dot``. Of T tokens of a replica, a partition has room for
            ``capacity_factor`` * T / ``partitions`` rows; ``math.inf`` drops nothing.
        dropout: rate for embeddings and residual branches. The paper has 0.1.
        attention_dropout: rate for attention weights. The paper has 0.1; its random bits grow with the square
            of the length, so it is off unless asked for.
        aux_weight: weight of the load-balancing loss, summed over MoE layers, on the scale where 1.0 is balanced.
        partitions: number of partitions of the experts that the marks of the MoE layers ask for; 1 places no marks.
        expert_axis: the mesh axis, or axes, of these partitions. The marks then name axes, and leave dimensions open
            that are neither groups nor experts. None: marks have the number of partitions only, and keep all other
            dimensions whole, which is right on a mesh of one axis.
        data_axis: the mesh axis, or axes, over which the batch is split into parts that have all experts each. Groups
            are split over these axes and those of the experts.
        replicas: the number of these parts: the devices along ``data_axis``. With ``ragged_all_to_all`` each has rows,
            and room for them, of its own.
        remat: recompute each pair of layers in the backward pass instead of keeping its activations; ``"branches"``
            recomputes each attention and feed-forward by itself and keeps what experts are sent and send back.
        dtype: dtype of activations; parameters, the router, softmaxes and losses are float32 always.
        top_k: k, the experts of a token with ``routing="top_k"``.
        gates: what becomes of logits: a ``softmax`` over all experts, or a ``sigmoid`` of each.
        normalise_gates: whether the weights of a token's experts are made to add up to 1; the paper's are.
        gate_scale: what all weights are multiplied by.
        balance: ``loss`` adds ``aux_weight`` times the load-balancing loss. ``bias`` adds nothing: a bias of each
            expert, which counts for the choice and not for the weights, is moved by ``gshard.moe.balanced`` after each
            step.
        shared_experts: experts that every token visits without being routed: one feed-forward of so many times H.
        experts_every: each so many layers one has experts: 2 is the paper's, 1 is all of them.
        dense_first: layers at the bottom of each stack that have none.
        dense_hidden_dim: H of layers without experts, if it is another.
        activation: between the products of experts and feed-forwards: ``relu``, or ``swiglu``, which takes a third one.
        positions: ``sinusoidal``, added to embeddings, or ``rotary``, which turns queries and keys of self-attention.
        rotary_base: longest wavelength of ``rotary`` by 2 pi, about.
        kv_heads: heads of keys and values, each for N / kv_heads heads of queries; None is N.
        tied_softmax: whether the target embedding is the softmax too.

    >>> TransformerConfig(100, 100, experts=8, encoder_layers=2, decoder_layers=4).moe_layers
    3
    """

    source_vocabulary: int
    target_vocabulary: int
    model_dim: int = 512
    hidden_dim: int = 2048
    heads: int = 8
    head_dim: int = 64
    encoder_layers: int = 6
    decoder_layers: int = 6
    experts: int = 0
    group_size: int | None = 1024
    groups: int | None = None
    capacity_factor: float = 2.0
    routing: str = "paper"
    dispatch: str = "gather"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    aux_weight: float = 0.01
    partitions: int = 1
    expert_axis: str | tuple[str, ...] | None = None
    data_axis: str | tuple[str, ...] | None = None
    replicas: int = 1
    remat: bool | str = False
    dtype: str = "float32"
    top_k: int = 2
    gates: str = "softmax"
    normalise_gates: bool = True
    gate_scale: float = 1.0
    balance: str = "loss"
    shared_experts: int = 0
    experts_every: int = 2
    dense_first: int = 0
    dense_hidden_dim: int | None = None
    activation: str = "relu"
    positions: str = "sinusoidal"
    rotary_base: float = 10_000.0
    kv_heads: int | None = None
    tied_softmax: bool = True

    @classmethod
    def decoder_only(cls, vocabulary: int, layers: int, **changes: Any) -> TransformerConfig:
        """A decoder as they are built now: rotary positions, SwiGLU, experts in every layer, k of them a token.

        Args:
            vocabulary: number of ids.
            layers: number of layers.
            changes: any other attribute.

        >>> config = TransformerConfig.decoder_only(100, 4, experts=8, top_k=3)
        >>> config.moe_layers, config.activation, config.encoder_layers
        (4, 'swiglu', 0)
        """
        chosen: dict[str, Any] = {"routing": "top_k", "experts_every": 1, "activation": "swiglu", "positions": "rotary",
            "tied_softmax": False, "dropout": 0.0}  # fmt: skip
        return cls(0, vocabulary, encoder_layers=0, decoder_layers=layers, **(chosen | changes))

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        for name in ("expert_axis", "data_axis"):  # hashable, also if it was read from a file
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        check(self)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The layers that are repeated, in order: the first of each pair has the experts, as in Lingvo."""
        if not self.experts:
            return ("dense",)
        return ("sparse", *("dense" if n == 1 else f"dense_{n}" for n in range(1, self.experts_every)))

    def parts(self, layers: int) -> dict[str, tuple[tuple[str, ...], int]]:
        """What a stack of so many layers is made of: names of parameters, kinds of a block's layers, number of blocks.

        >>> TransformerConfig.decoder_only(9, 4, experts=8, dense_first=1).parts(4)
        {'first': (('dense',), 1), 'blocks': (('sparse',), 3)}
        """
        first = self.dense_first if self.experts else 0
        blocks = (self.layer_kinds, (layers - first) // len(self.layer_kinds))
        return ({"first": (("dense",), first)} if first else {}) | {"blocks": blocks}

    @property
    def moe_layers(self) -> int:
        """Number of MoE layers of encoder and decoder together."""
        stacks = [layers - self.dense_first for layers in (self.encoder_layers, self.decoder_layers) if layers]
        return sum(stacks) // self.experts_every if self.experts else 0

    @property
    def has_slots(self) -> bool:
        """Whether the dispatch gives each expert a number of slots for each group."""
        return self.dispatch in ("einsum", "gather")

    def tokens_of_a_group(self, tokens: int) -> int:
        """S for a batch of ``tokens`` tokens.

        Raises:
            ModelError: ``group_size``, or ``groups``, does not divide ``tokens``.

        >>> TransformerConfig(9, 9, experts=2, group_size=None, partitions=4).tokens_of_a_group(96)
        24
        >>> TransformerConfig(9, 9, experts=2, group_size=None, groups=8, partitions=4).tokens_of_a_group(96)
        12
        """
        if self.groups is not None:
            require(
                tokens % self.groups == 0,
                f"{tokens} tokens cannot be dealt out to {self.groups} groups.",
                f"batch times length is {tokens}; groups={self.groups}",
                "Choose a number of groups that divides batch times length, or of rows.",
            )
        elif self.group_size is not None:
            require(
                tokens % self.group_size == 0,
                f"{tokens} tokens do not fill groups of {self.group_size}.",
                f"batch times length is {tokens}; group_size={self.group_size}",
                "Choose a group size that divides batch times length, or group_size=None for one group a partition.",
            )
        size = self.group_size or tokens // (self.groups or math.gcd(tokens, self.partitions * self.replicas))
        require(
            self.has_slots or tokens // size % self.replicas == 0,
            f"dispatch {self.dispatch!r} gives each replica of the experts as many groups as the others.",
            f"{tokens // size} groups of {size} tokens; replicas={self.replicas}",
            "Choose a number of groups that is a multiple of the replicas, or dispatch='gather'.",
        )
        return size

    def capacity(self, tokens_of_group: int) -> int:
        """C, the slots of one expert for one group of S tokens.

        The paper's C = 2S/E is a real number; as in Lingvo it is rounded down here. A capacity below one
        would drop every token, which other implementations do silently or hide behind a minimum of 4.

        Raises:
            ModelError: the capacity is below 1.

        >>> TransformerConfig(9, 9, experts=8, group_size=64).capacity(64)
        16
        """
        # An expert is chosen at most once by a token, so S slots are always enough.
        slots = min(self.capacity_factor * tokens_of_group / self.experts, float(tokens_of_group))
        require(
            slots >= 1,
            "the capacity of an expert is below 1: every token would be dropped.",
            f"capacity_factor {self.capacity_factor} * {tokens_of_group} tokens of a group / {self.experts} experts"
            f" = {significant(slots, 3)}",
            f"Use groups of at least {math.ceil(self.experts / self.capacity_factor)} tokens,"
            " or a larger capacity_factor.",
        )
        # 1e-9: a factor such as 1.1 must not lose a slot to its binary rounding.
        return math.floor(slots + 1e-9)

    def room(self, tokens: int) -> int:
        """X, the rows that a partition of a replica has room for with ``ragged_all_to_all``.

        Args:
            tokens: T, all tokens.

        Raises:
            ModelError: the room is below 1.

        >>> config = TransformerConfig(9, 9, experts=8, partitions=4, dispatch="ragged_all_to_all", capacity_factor=2.5)
        >>> config.room(64), dataclasses.replace(config, capacity_factor=math.inf).room(64)
        (40, 128)
        """
        most = tokens // self.replicas * min(self.top_k, self.experts // self.partitions)
        rows = min(self.capacity_factor * tokens / (self.partitions * self.replicas), float(most))
        require(
            rows >= 1,
            "the room of a partition is below 1: every token would be dropped.",
            f"capacity_factor {self.capacity_factor} * {tokens} tokens / {self.partitions} partitions"
            f"{f' of {self.replicas} replicas' if self.replicas > 1 else ''} = {significant(rows, 3)}",
            "Use a larger batch or a larger capacity_factor.",
        )
        return math.floor(rows + 1e-9)

    def dropless(self) -> TransformerConfig:
        """The same model routed such that no token is dropped and no batch mate matters.

        One partition runs blocks. Several run ``gather`` with as many slots for each expert as a group has
        tokens: E/k times the products that are needed, which is little where reading the weights takes longer
        (decoding), and much for a large batch of sources.

        >>> TransformerConfig(9, 9, experts=8).dropless().dispatch
        'blocks'
        """
        if not self.experts:
            return self
        dispatch = "blocks" if self.partitions * self.replicas == 1 else "gather"
        return dataclasses.replace(self, capacity_factor=math.inf, group_size=None, groups=None, dispatch=dispatch)


def _paper(layers: int, experts: int, **changes: int | str) -> TransformerConfig:
    """A row of Table 1: appendix A.2 gives M, H, heads and vocabularies; L counts encoder and decoder layers."""
    base = TransformerConfig(
        source_vocabulary=64_000,
        target_vocabulary=32_000,
        model_dim=1024,
        hidden_dim=8192,
        heads=16,
        head_dim=128,
        encoder_layers=layers // 2,
        decoder_layers=layers // 2,
        experts=experts,
        group_size=1024,
        dropout=0.1,
        attention_dropout=0.1,
        partitions=max(experts, 1),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


# Section 4.4 counts "12 (original Transformer depth: 6 encoder and 6 decoder layers)". With an expert of
# 2 * 1024 * 8192 weights, 18 MoE layers of 2048 make 618e9. The paper's "36684" and "12228" experts are
# misprints of 18 * 2048 = 36864 and 6 * 2048 = 12288. T(96L) comes to its 2.3e9 with heads of 64 (with 128
# it would be 2.9e9): A.2 speaks of the MoE models only.
TABLE_1 = MappingProxyType(
    {
        "MoE(2048E, 36L)": _paper(36, 2048),
        "MoE(2048E, 12L)": _paper(12, 2048),
        "MoE(512E, 36L)": _paper(36, 512),
        "MoE(512E, 12L)": _paper(12, 512),
        "MoE(128E, 36L)": _paper(36, 128),
        "MoE(128E, 12L)": _paper(12, 128),
        "MoE(2048E, 60L)": _paper(60, 2048, dtype="bfloat16"),
        "T(96L)": _paper(96, 0, head_dim=64),
    }
)


_decoder = functools.partial(TransformerConfig.decoder_only, head_dim=128, group_size=4096, dtype="bfloat16")

# Jiang et al. 2024, "Mixtral of Experts": 46.7e9 weights, 12.9e9 of them for a token.
_MIXTRAL = _decoder(
    32_000,
    32,
    model_dim=4096,
    hidden_dim=14_336,
    heads=32,
    kv_heads=8,
    experts=8,
    top_k=2,
    capacity_factor=2.5,
    aux_weight=0.02,
    rotary_base=1e6,
)

DECODERS = MappingProxyType(
    {
        "Mixtral-8x7B": _MIXTRAL,
        # The same authors, 2024: 141e9 weights, 39e9 of them for a token.
        "Mixtral-8x22B": dataclasses.replace(
            _MIXTRAL, decoder_layers=56, model_dim=6144, hidden_dim=16_384, heads=48, aux_weight=0.001
        ),
        # Dai et al. 2024, "DeepSeekMoE": 16.4e9 weights, 2.8e9 of them for a token.
        "DeepSeekMoE-16B": _decoder(
            102_400,
            28,
            model_dim=2048,
            hidden_dim=1408,
            heads=16,
            experts=64,
            top_k=6,
            shared_experts=2,
            dense_first=1,
            dense_hidden_dim=10_944,
            normalise_gates=False,
            capacity_factor=7.5,
            aux_weight=0.001,
        ),
        # DeepSeek-AI 2024, "DeepSeek-V3": 671e9 weights, 37e9 of them for a token. Ours has 4e9 more, because eight
        # heads of keys and values stand in for the latent attention. Routing by groups of experts is left out.
        "DeepSeek-V3-like": _decoder(
            129_280,
            61,
            model_dim=7168,
            hidden_dim=2048,
            heads=128,
            kv_heads=8,
            experts=256,
            top_k=8,
            shared_experts=1,
            dense_first=3,
            dense_hidden_dim=18_432,
            gates="sigmoid",
            gate_scale=2.5,
            balance="bias",
            capacity_factor=10.0,
        ),
    }
)

MODELS = MappingProxyType({**TABLE_1, **DECODERS})
