"""Named models: as many weights as their publishers say, and names that are found."""

import pytest

from gshard.moe import MODELS, TABLE_1, ModelError, model, model_name, param_specs, parameter_count


@pytest.mark.parametrize(
    "name, weights",
    [("Mixtral-8x7B", 46.70e9), ("Mixtral-8x22B", 140.6e9), ("DeepSeekMoE-16B", 16.38e9), ("DeepSeek-V3-like", 671e9)],
)
def test_weights_are_those_of_the_model_card(name, weights):
    """Within half a percent, but for the attention of DeepSeek-V3, which is another one."""
    config = model(name)
    count = parameter_count(param_specs(config))
    assert count == pytest.approx(weights, rel=0.01 if name == "DeepSeek-V3-like" else 0.003)
    assert config.moe_layers == config.decoder_layers - config.dense_first


@pytest.mark.parametrize(
    "written, name",
    [
        ("mixtral-8x7b", "Mixtral-8x7B"),
        ("MIXTRAL 8x22B", "Mixtral-8x22B"),
        ("deepseek_v3_like", "DeepSeek-V3-like"),
        ("moe(2048e,36l)", "MoE(2048E, 36L)"),
    ],
)
def test_capitals_and_punctuation_do_not_matter(written, name):
    assert model_name(written) == name
    assert model(written) is MODELS[name]


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(ModelError, match="Did you mean 'Mixtral-8x7B'") as error:
        model("mixtrl-8x7b")
    assert all(name in str(error.value) for name in TABLE_1)
    with pytest.raises(ModelError, match="no model is called 'gpt'"):
        model("gpt")
