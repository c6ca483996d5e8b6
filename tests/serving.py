"""A real server with a small random model: ``python tests/serving.py '{"rate": 0}'``."""

import json
import sys
from types import MappingProxyType

import jax
import jax.numpy as jnp

from gshard import moe
from gshard_m4.decode import DecodeConfig
from gshard_m4.serve import server
from gshard_m4.serve.config import ServeConfig
from gshard_m4.translate import Translator
from moe import naive

WORDS = "save the file open a new window close now please help".split()


class Words:
    """The vocabulary: ids 3 and up are words; others are unknown."""

    fingerprint = "words"
    target_vocabulary = 3 + len(WORDS)
    languages = MappingProxyType({"de": 900, "fr": 800, "zh_Hant": 300, "sr_Latn": 20, "yo": 3})
    source_vocabulary = target_vocabulary + len(languages)
    length = 16

    def tag(self, language):
        return self.target_vocabulary + list(self.languages).index(language)

    def source_ids(self, sentence):
        return [WORDS.index(word) + 3 if word in WORDS else 2 for word in sentence.split()]

    def english(self, ids):
        return " ".join(WORDS[i - 3] for i in ids)

    def spelt_in_bytes(self, ids):
        return 0.0


def translator():
    text = Words()
    model = moe.TransformerConfig(
        text.source_vocabulary, text.target_vocabulary, model_dim=16, hidden_dim=32, heads=2, head_dim=8,
        encoder_layers=2, decoder_layers=2, experts=4, group_size=None,
    )  # fmt: skip
    params = jax.tree.map(jnp.asarray, naive.values(moe.param_specs(model), 8))
    params["target_embedding"] = 5.0 * params["target_embedding"]
    for kind in ("sparse", "dense"):  # what is written depends on what is read
        attention = params["decoder"]["blocks"][kind]["memory_attention"]
        attention["output"] = 8.0 * attention["output"]
    return Translator(model, params, text, DecodeConfig(beam=3, alpha=1.0, n_best=3, max_length=8), batch=8)


if __name__ == "__main__":
    options = ServeConfig(port=0, **json.loads(sys.argv[1]))
    with server.listen(options) as bound:
        sys.exit(128 + server.serve(translator(), options, bound))
