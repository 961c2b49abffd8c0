"""FSDP2 for a converted model: layers and experts are gathered while they compute, and sharded otherwise.

Gradients are summed over ranks, not averaged: the loss of a rank is its share of the mean over the whole
batch, so that gradients, and what is rounded on the way, have the values that they would have on one rank.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from nybble.errors import ConfigError
from nybble.layers import Experts
from nybble.layers.experts import up_name
from nybble.parallel.gather import fault, gather_codes
from nybble.parallel.mesh import Mesh
from nybble.parallel.wire import Monitor

GATHERS = ("fp32", "bf16", "nvfp4")
STACKS = ("layers", "h", "blocks")
"""Names of the lists of decoder layers in models."""

VIEWS = r"FSDP2-wrapped module \(FSDP(Sliding|Full)DecoderLayer\) returned a view"
"""What torch warns of where our own layers hand on blocks on GPUs: nothing is added to those in place."""


def shard(
    model: nn.Module,
    mesh: Mesh,
    *,
    gather: str = "fp32",
    reshard: bool = True,
    monitor: Monitor | None = None,
) -> nn.Module:
    """Shard the parameters of `model` over the ranks of `mesh`, after `convert` and before the optimiser.

    Args:
        gather: in which format parameters are gathered: "fp32" as they are; "bf16" quantises other weights
            than one process; "nvfp4" gathers the codes of experts that need no more (see `gather.py`), the
            rest as it is. Gradients are reduced in FP32.
        reshard: free a layer's parameters after its forward pass and gather them again for the backward pass.
        monitor: what gathers of codes report to; a new one if None.
    Raises:
        ConfigError: if there is no such `gather`, or "nvfp4" fits no experts of the model.
    """
    if gather not in GATHERS:
        raise ConfigError(f"gather is {gather!r}; it is one of {', '.join(GATHERS)}")
    dtype = torch.bfloat16 if gather == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    named: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    alone: set[nn.Parameter] = set()
    warnings.filterwarnings("ignore", VIEWS, UserWarning)
    if gather == "nvfp4":
        _gather_codes(model, mesh, monitor or Monitor(), keep=not reshard)
    sparse = mesh.sparse["replicate", "fsdp"] if mesh.sparse["replicate"].size() > 1 else mesh.sparse["fsdp"]
    dense = mesh.dense if mesh.dense["replicate"].size() > 1 else mesh.dense["shard"]
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        if module.gather is not None:
            alone.update(module.parameters(recurse=False))
        elif mesh.expert_parallel == 1:
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
    # What lies outside of the layers is wanted at once by the backward pass. Freed, it would not come back
    # with torch 2.11, which looks for what begins a backward pass in tuples, not in a `CausalLMOutput`.
    fully_shard(model, mesh=dense, ignored_params=alone, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _gather_codes(model: nn.Module, mesh: Mesh, monitor: Monitor, *, keep: bool) -> None:
    """Let experts be gathered as codes where that can be."""
    ranks = mesh.sparse["fsdp"].size()
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    faults = {name: fault(module, ranks) for name, module in named}
    fitting = [(name, module) for name, module in named if faults[name] is None]
    if ranks == 1 or not fitting:
        why = "no two ranks have the same experts" if ranks == 1 else _first(faults)
        raise ConfigError(f"gather nvfp4 has nothing to gather: {why}; leave it out")
    for name, module in fitting:
        gather_codes(name, module, mesh, monitor, keep=keep)


def _first(faults: dict[str, str | None]) -> str:
    """The first of the faults, with its layer."""
    return next((f"{name}: {why}" for name, why in faults.items()), "the model has no experts")
