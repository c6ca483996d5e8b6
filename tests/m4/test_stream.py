"""The search gives the translations of a batch, and no translation depends on when its sentence came."""

import dataclasses

import jax
import numpy as np
import pytest

import gshard
from gshard import moe
from gshard_m4.decode import EOS, DecodeConfig
from gshard_m4.stream import Search, Sentence, _programs, placed
from m4.test_decode import decode
from moe import naive

CONFIG = moe.TransformerConfig(
    source_vocabulary=23, target_vocabulary=11, model_dim=16, hidden_dim=24, heads=2, head_dim=8, encoder_layers=2,
    decoder_layers=2, experts=4, group_size=None,
)  # fmt: skip
OPTIONS = DecodeConfig(beam=3, alpha=0.0, max_length=12)  # without a bonus for length, a search is seen to be over


@pytest.fixture(scope="module")
def params():
    """Of a model whose translations are of many lengths, and depend on what is read."""
    found = jax.jit(moe.init, static_argnums=0)(CONFIG, jax.random.key(9))
    found["target_embedding"] = 6.0 * found["target_embedding"]
    for layer in found["decoder"]["blocks"].values():
        layer["memory_attention"]["output"] = 8.0 * layer["memory_attention"]["output"]
    return placed(CONFIG, found)


def sentences(rng, count, width=8):
    lengths = rng.integers(1, width, count)
    return [Sentence((*map(int, rng.integers(3, CONFIG.source_vocabulary, n)), EOS), width) for n in lengths]


def drive(search, asked, arrivals=None):
    """Tokens and scores of each; arrivals says how many steps each comes after the one before."""
    waiting = list(enumerate(asked))
    gaps = list(arrivals or [0] * len(asked))
    found = {}
    while waiting or search.busy:
        while waiting and gaps[0] <= 0 and search.room(waiting[0][1].width) > 0:
            search.add(*waiting.pop(0))
            gaps.pop(0)
        if gaps:
            gaps[0] -= 1
        for of in search.step(more=bool(waiting)):
            assert of.ticket not in found
            found[of.ticket] = of.tokens_NT.tolist(), of.score_N.tolist()
    return [found[n] for n in range(len(asked))]


def test_it_finds_what_a_batch_finds(params, rng):
    asked = sentences(rng, 24)
    source = np.zeros((len(asked), 8), np.int32)
    for row, of in enumerate(asked):
        source[row, : len(of.ids)] = of.ids
    batches = [decode(CONFIG, params, source[first : first + 6], OPTIONS) for first in range(0, 24, 6)]
    got = drive(Search(CONFIG, params, OPTIONS, batch=6, steps=2), asked)
    assert [tokens for tokens, _ in got] == np.concatenate([of.tokens_BNT for of in batches]).tolist()
    np.testing.assert_allclose(
        [scores for _, scores in got], np.concatenate([of.score_BN for of in batches]), rtol=1e-5
    )
    ends = [int(np.count_nonzero(tokens[0])) for tokens, _ in got]
    assert len(set(ends)) > 3, "translations of one length prove little"


def test_partitioned_equals_one_device(rng):
    """Sources are encoded and the loop runs in partitioned programs; experts are split over the devices."""
    devices = 8
    config = dataclasses.replace(CONFIG, experts=devices)
    params = naive.values(moe.param_specs(config), 3)
    params["target_embedding"] = 6.0 * params["target_embedding"]
    asked = sentences(rng, 30, width=12)
    options = DecodeConfig(beam=4, n_best=3, max_length=8)
    one = drive(Search(config, placed(config, params), options, batch=24), asked)
    on_all = placed(config, params, devices)
    many = drive(Search(config, on_all, options, batch=24, devices=devices), asked)
    assert [tokens for tokens, _ in many] == [tokens for tokens, _ in one]
    np.testing.assert_allclose([scores for _, scores in many], [scores for _, scores in one], rtol=1e-4)

    empty, _, advance = _programs(config, options, 24, 12, devices)
    asked_of = on_all, jax.eval_shape(empty, params), np.int32(8), np.int32(0)
    assert "all_to_all" in {c.kind for c in advance.lower(*asked_of).spmd.collectives}
    split = [row for row in gshard.explain(advance, *asked_of).tensors if f"{devices}@devices" in str(row.sharding)]
    assert sum("experts" in row.name for row in split if row.is_argument) == 4, "both products of both stacks"


def test_nobody_s_translation_depends_on_when_it_came(params, rng):
    """To the last bit: in another order, among others, through other places, one step at a time or all at once."""
    asked = sentences(rng, 12) + sentences(rng, 6, width=16)
    want = drive(Search(CONFIG, params, OPTIONS, batch=6, steps=100), asked)
    for steps in (1, 3):
        order = rng.permutation(len(asked))
        arrivals = rng.integers(0, 4, len(asked)).tolist()
        search = Search(CONFIG, params, OPTIONS, batch=6, steps=steps)
        got = drive(search, [asked[n] for n in order], arrivals)
        assert [got[place] for place in np.argsort(order)] == want
    queue = Search(CONFIG, params, OPTIONS, batch=6)
    for number, of in enumerate(asked):
        queue.add(number, of)
    assert queue.room(8) == 0
    left = {}
    while queue.busy:
        left |= {of.ticket: (of.tokens_NT.tolist(), of.score_N.tolist()) for of in queue.step()}
    assert [left[number] for number in range(len(asked))] == want, "those for whom there is no room wait"
    alone = Search(CONFIG, params, OPTIONS, batch=6)
    assert [drive(alone, [of])[0] for of in asked[:3]] == want[:3], "and a place serves one after the other"


def test_few_do_not_take_as_many_turns_as_many_and_are_not_forgotten(params, rng):
    search = Search(CONFIG, params, OPTIONS, batch=6, steps=1)
    few, many = sentences(rng, 1, width=16), sentences(rng, 60)
    search.add("few", few[0])
    left = {}
    for turn in range(1000):
        while many and search.room(8):
            search.add(len(many), many.pop())
        left |= {of.ticket: turn for of in search.step(more=bool(many))}
        if not (many or search.busy):
            break
    assert len(left) == 61
    assert sum(turn < left["few"] for turn in left.values()) >= 24, "those of one width took most turns"
    assert left["few"] < max(left.values()), "but not all"


def test_each_program_is_compiled_once(params, rng):
    """Also for a search under way: what a first sentence has compiled, no later one waits for.

    The parameters are placed on a device, as those of a run are. The programs are those of all tests of this file.
    """
    drive(Search(CONFIG, params, OPTIONS, batch=6), sentences(rng, 1))
    programs = _programs(CONFIG, OPTIONS, 6, 8, 1)
    compiled = [program._cache_size() for program in programs]
    drive(Search(CONFIG, params, OPTIONS, batch=6, steps=1), sentences(rng, 9), [1] * 9)
    assert [program._cache_size() for program in programs] == compiled


def test_a_model_that_knows_no_finite_score_does_not_harm_the_others(params, rng):
    """Places that hold nobody yet, and ids that are no words (NaN), stay in their rows."""
    asked = sentences(rng, 4)
    broken = dataclasses.replace(CONFIG, experts=0)  # rows of experts' blocks are shared
    dense = placed(broken, naive.values(moe.param_specs(broken), 1))
    sound = drive(Search(broken, dense, OPTIONS, batch=6), asked)
    search = Search(broken, dense, OPTIONS, batch=6)
    got = drive(search, [asked[0], Sentence((99, EOS), 8), *asked[1:]])
    assert [got[0], *got[2:]] == sound
    assert not np.isfinite(got[1][1]).any()
