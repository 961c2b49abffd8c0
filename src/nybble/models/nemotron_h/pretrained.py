"""Folders and initial weights of Nemotron-H, through transformers' own machinery."""

import math

import torch
from torch import nn
from transformers import NemotronHConfig
from transformers import initialization as init

from nybble.models.balance import ExpertLoad
from nybble.models.nemotron_h.mamba import GatedRMSNorm, Mamba2
from nybble.models.nemotron_h.mlp import Experts, Router
from nybble.models.pretrained import Pretrained


class NemotronHPreTrainedModel(Pretrained):
    """Folders and initial weights, as transformers' class has them."""

    config: NemotronHConfig
    config_class = NemotronHConfig
    base_model_prefix = "model"
    _input_embed_layer = "embeddings"
    _no_split_modules = ("Block",)
    _keep_in_fp32_modules_strict = ("e_score_correction_bias", "gate.weight")
    # a config that transformers' class has touched names an implementation; here the device decides
    _supports_sdpa = True
    _supports_flex_attn = True
    # the layers that predict further tokens are of no use here, nor are they to transformers' class
    _keys_to_ignore_on_load_unexpected = (r"mtp.*",)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        config, std = self.config, self.config.initializer_range
        if isinstance(module, Mamba2):
            init.copy_(module.A_log, torch.arange(1, config.mamba_num_heads + 1).log())
            init.ones_(module.D)
            # steps spread evenly over the orders of magnitude from time_step_min to time_step_max
            low, high = math.log(config.time_step_min), math.log(config.time_step_max)
            step = (low + torch.rand(config.mamba_num_heads) * (high - low)).exp()
            step = step.clamp(min=config.time_step_floor)
            init.copy_(module.dt_bias, step + (-(-step).expm1()).log())  # the inverse of softplus
            if config.rescale_prenorm_residual:
                # the residual stream sums num_hidden_layers outputs
                bound = 1.0 / math.sqrt(module.out_proj.in_features * config.num_hidden_layers)
                init.uniform_(module.out_proj.weight, -bound, bound)
        elif isinstance(module, GatedRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, Experts):
            init.normal_(module.up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, ExpertLoad):
            init.zeros_(module.expert_load)
