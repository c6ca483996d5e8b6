"""moe: the GShard Mixture-of-Experts Transformer, written for one device and marked.

It imports JAX, gshard's marks, ``put_rows`` and ``take_rows`` only, so it also runs under plain ``jax.jit``, ``grad``,
``vmap`` and ``scan``. Parameters are nested dicts of arrays. Everything else is a pure function with a frozen
configuration.

Names of arrays end in the letters of their dimensions, as in the paper: ``dispatched_EGCM``.

    G groups              B sentences            V vocabulary
    S tokens of a group   L length               N heads
    E experts             K attended positions   D head size
    C capacity            M model                T tokens of a batch
    X anything else       H hidden               R rows of a block
    P partitions

In reading order: ``param`` and ``config``, ``gating`` (Algorithm 1), ``ragged``, ``experts`` (Algorithm 2),
``attention``, ``transformer``, ``decoding``, ``models``.
"""

from gshard.moe.attention import KeysValues as KeysValues
from gshard.moe.config import MODELS as MODELS
from gshard.moe.config import TABLE_1 as TABLE_1
from gshard.moe.config import ModelError as ModelError
from gshard.moe.config import TransformerConfig as TransformerConfig
from gshard.moe.decoding import decode_flat_step as decode_flat_step
from gshard.moe.decoding import decode_step as decode_step
from gshard.moe.decoding import encode as encode
from gshard.moe.decoding import init_cache as init_cache
from gshard.moe.decoding import project_memory as project_memory
from gshard.moe.experts import expert_layer as expert_layer
from gshard.moe.experts import expert_specs as expert_specs
from gshard.moe.gating import Choice as Choice
from gshard.moe.gating import Gating as Gating
from gshard.moe.gating import balanced as balanced
from gshard.moe.gating import top_k_gating as top_k_gating
from gshard.moe.param import Param as Param
from gshard.moe.param import init_params as init_params
from gshard.moe.param import names as names
from gshard.moe.param import parameter_count as parameter_count
from gshard.moe.param import shapes as shapes
from gshard.moe.transformer import forward as forward
from gshard.moe.transformer import init as init
from gshard.moe.transformer import loss as loss
from gshard.moe.transformer import param_specs as param_specs
