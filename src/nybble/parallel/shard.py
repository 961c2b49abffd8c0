"""FSDP2 for a converted model: layers and experts are gathered while they compute, and sharded otherwise.

Gradients are summed over ranks, not averaged: the loss of a rank is its share of the mean over the whole
batch, so that gradients, and what is rounded on the way, have the values that they would have on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from nybble.layers import Experts
from nybble.layers.experts import up_name
from nybble.parallel.mesh import Mesh

STACKS = ("layers", "h", "blocks")
"""Names of the lists of decoder layers in models."""


def shard(
    model: nn.Module, mesh: Mesh, *, gather: torch.dtype | None = None, reshard: bool = True
) -> nn.Module:
    """Shard the parameters of `model` over the ranks of `mesh`, after `convert` and before the optimiser.

    Args:
        gather: dtype in which parameters are gathered, such as BF16; None is their own, which alone
            quantises the same weights as one process. Gradients are reduced in FP32.
        reshard: free a layer's parameters after its forward pass and gather them again for the backward pass.
    """
    policy = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=torch.float32, cast_forward_inputs=False)
    named: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    alone: set[nn.Parameter] = set()
    sparse = mesh.sparse["replicate", "fsdp"] if mesh.sparse["replicate"].size() > 1 else mesh.sparse["fsdp"]
    dense = mesh.dense if mesh.dense["replicate"].size() > 1 else mesh.dense["shard"]
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        if mesh.expert_parallel == 1:
            fully_shard(module, mesh=dense, **named)
        elif sparse.size() > 1:
            # More ranks than experts: each takes a part of every expert.
            split = mesh.sparse["fsdp"].size() > getattr(module, up_name(module)).to_local().shape[0]
            place = (lambda _: Shard(1)) if split else None
            fully_shard(module, mesh=sparse, shard_placement_fn=place, **named)
        else:
            alone.update(module.parameters(recurse=False))
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in STACKS:
            for layer in module:
                fully_shard(layer, mesh=dense, ignored_params=alone, **named)
    fully_shard(model, mesh=dense, ignored_params=alone, **named)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model
