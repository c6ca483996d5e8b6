"""The paper's models and decoders, planned: names, meshes, layouts, collectives, memory."""

import dataclasses
import re

import pytest
from benchmarks.paper_models import _batch, configured, lower, mesh_for, plan, searched

from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.device.cost import cost
from gshard.device.fusion_model import PRODUCT
from gshard.moe import param_specs, parameter_count
from gshard.moe.config import TABLE_1

SMALL = {"decoder_layers": 2, "model_dim": 256, "hidden_dim": 512, "heads": 4, "kv_heads": 2, "head_dim": 64,
    "target_vocabulary": 1024, "remat": False}  # fmt: skip


def small(name, topology, **changes):
    config, machine = configured(name, topology)
    return dataclasses.replace(config, **(SMALL | changes)), machine


def test_experts_have_an_axis_and_every_weight_is_split():
    config, machine = configured("Mixtral-8x7B", "h100:8x8")
    assert config.partitions == 1
    assert config.remat
    mesh = mesh_for(config, machine)
    assert str(mesh) == str(Mesh.abstract(data=8, experts=8))
    config, machine = small("Mixtral-8x7B", "h100:8x8")
    lowered, batch = lower(config, mesh)
    assert batch == (256, 4096)
    inputs = zip(lowered.program.names, lowered.plan.program.block.inputs, strict=True)
    local = {n: local_bytes(v, lowered.plan.sharding(v), lowered.mesh) for n, v in inputs if "params" in n}
    whole = {n: v.bytes for n, v in zip(lowered.program.names, lowered.program.block.inputs, strict=True)}
    assert len(local) >= 12
    assert all(64 * local[name] == whole[name] for name in local), local
    kinds = {c.kind for c in lowered.spmd.collectives}
    assert {"all_to_all", "all_gather", "reduce_scatter"} <= kinds
    # A device multiplies a 64th of what all tokens need: six FLOPs for each weight that a token meets, 1.25 times that
    # at experts, and the scores of attention.
    specs = param_specs(config)
    experts = specs["decoder"]["blocks"]["sparse"]["experts"]
    of_experts = parameter_count({name: experts[name] for name in ("wi", "wi_gate", "wo")})
    others = parameter_count(specs) - parameter_count(specs["target_embedding"]) - of_experts
    attention = 3 * 4 * 4096 * config.heads * config.head_dim * config.decoder_layers
    needed = 256 * 4096 * (6 * (others + of_experts * 2.5 / 8) + attention) / 64
    found = cost(lowered.spmd, machine, lowered.donated)
    products = sum(kernel.flops * kernel.times for kernel in found.kernels if kernel.kind == PRODUCT)
    assert products == pytest.approx(needed, rel=0.05)


def test_experts_that_do_not_divide_the_devices_share_what_does():
    config, machine = small("DeepSeekMoE-16B", "h100:4x8", experts=24, top_k=3, shared_experts=1, dense_first=1)
    assert dict(mesh_for(config, machine).axes) == {"data": 4, "experts": 8}
    assert _batch(config, 512, None) == (512, 4096), "a text for every device"


@pytest.mark.slow
def test_a_decoder_is_searched():
    config, machine = small("Mixtral-8x7B", "h100:1x8", decoder_layers=1, group_size=1024)
    bare, found = searched(config, mesh_for(config, machine), machine, tokens_of_device=4096)
    assert bare.partitions == 1
    assert found.best.seconds > 0


@pytest.mark.slow
def test_plan_of_a_model_of_table_1():
    """MoE(128E, 12L): the paper's marks alone give all-to-alls and sums of gradients.

    The weights of the paper's marks are replicated, and gradients are summed for all devices; most of them are
    scattered, so that each device updates a part of the weights, which is then gathered: the same bytes, less work.
    """
    found = plan("MoE(128E, 12L)", "v3:8x8", remat=True)
    assert set(found.collectives) == {"all_to_all", "all_reduce", "all_gather", "reduce_scatter"}
    config = found.config
    # Forward, recomputed forward and backward: to the experts and back, in each MoE layer, and two for embeddings.
    assert 0 <= found.collectives["all_to_all"][0] - 6 * config.moe_layers <= 2
    summed = sum(found.collectives[kind][1] for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    assert summed < 2 * found.replicated
    experts = 4 * config.moe_layers * 2 * config.model_dim * config.hidden_dim
    assert found.distributed == experts, "one expert of each layer on each device"
    assert found.cost.fits
    text = str(found)
    assert "fits" in text
    assert "MoE dispatch and combine" in text
    assert found.parameters == pytest.approx(13e9, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_plan_of_the_paper_is_found_without_its_marks():
    """MoE(128E, 12L): experts over devices, tokens by group, and less memory than with the marks, which do not fit."""
    by_hand = plan("MoE(128E, 12L)", "v3:8x8")
    assert not by_hand.cost.fits
    found = plan("MoE(128E, 12L)", "v3:8x8", search_plan=True)
    assert "searched, without a mark" in str(found)
    assert found.cost.fits
    assert found.cost.seconds <= 1.1 * by_hand.cost.seconds
    assert "all_to_all" in found.collectives
    program = found.found.plan.program
    for v, name in zip(program.block.inputs, program.names, strict=True):
        if "['experts']['wi']" in name:
            assert found.found.plan.mesh.count(found.found.plan.shardings[v].dims[1]) == 128


@pytest.mark.slow
def test_the_largest_model_fits():
    """MoE(2048E, 60L); for 12 GiB nothing is needed but that gradients are recomputed."""
    found, limited = (plan("MoE(2048E, 60L)", "v3:32x32", memory_limit=limit) for limit in (None, "12GiB"))
    assert found.cost.fits
    assert limited.cost.peak <= 12 * 2**30 < found.cost.peak < 13 * 2**30
    assert limited.recomputed.share < 0.01
    assert limited.cost.seconds <= found.cost.seconds
    assert "recomputed to fit in 12,288.0 MiB" in str(limited)
    # Sums of gradients that are updated in parts are scattered, and what is updated is gathered; experts never are.
    assert {"all_to_all", "all_reduce"} <= set(found.collectives)
    gathered = [k.result for k in found.cost.kernels if k.name in ("all_gather", "reduce_scatter")]
    # Numbers of tokens may be gathered.
    assert not any(re.match(r"(f32|bf16)\[\d+,1,", text) for text in gathered), "[layers, one expert of a device, ...]"


def test_every_row_of_the_table_has_a_batch_that_its_devices_can_split():
    for name in TABLE_1:
        config, machine = configured(name, "v3")
        sentences, length = _batch(config, machine.size, None)
        assert sentences % machine.size == 0
        assert sentences * length % 1024 == 0
