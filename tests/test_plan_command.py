"""Decoders that are planned: names, meshes, layouts. The paper's models are in test_command_line."""

import dataclasses

import pytest

from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.device.cost import cost
from gshard.device.fusion_model import PRODUCT
from gshard.moe import param_specs, parameter_count
from gshard.plan_command import _batch, configured, lower, mesh_for, searched

SMALL = {"decoder_layers": 2, "model_dim": 256, "hidden_dim": 512, "heads": 4, "kv_heads": 2, "head_dim": 64,
    "target_vocabulary": 1024, "remat": False}  # fmt: skip


def small(name, topology, **changes):
    config, machine = configured(name, topology)
    return dataclasses.replace(config, **(SMALL | changes)), machine


def test_experts_have_an_axis_and_every_weight_is_split():
    config, machine = configured("MIXTRAL 8x7b", "h100:8x8")
    assert config.partitions == 1
    assert config.remat
    mesh = mesh_for(config, machine)
    assert str(mesh) == str(Mesh.abstract(data=8, experts=8))
    config, machine = small("mixtral-8x7b", "h100:8x8")
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
    config, machine = small("deepseekmoe-16b", "h100:4x8", experts=24, top_k=3, shared_experts=1, dense_first=1)
    assert dict(mesh_for(config, machine).axes) == {"data": 4, "experts": 8}
    assert _batch(config, 512, None) == (512, 4096), "a text for every device"


@pytest.mark.slow
def test_a_decoder_is_searched():
    config, machine = small("mixtral-8x7b", "h100:1x8", decoder_layers=1, group_size=1024)
    bare, found = searched(config, mesh_for(config, machine), machine, tokens_of_device=4096)
    assert bare.partitions == 1
    assert found.best.seconds > 0
