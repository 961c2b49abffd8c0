"""Folders and initial weights of Inkling 2, through transformers' own machinery."""

from torch import nn
from transformers import Inkling2TextConfig
from transformers import initialization as init

from nybble.models.balance import ExpertLoad
from nybble.models.inkling2.attention import RelativePositionBias, ScaledClip
from nybble.models.inkling2.conv import DynamicShortConvolution
from nybble.models.inkling2.experts import Experts
from nybble.models.inkling2.residual import BlockAttentionResidual
from nybble.models.inkling2.router import Router
from nybble.models.pretrained import Pretrained


class Inkling2PreTrainedModel(Pretrained):
    """Folders and initial weights, as transformers' class has them."""

    config: Inkling2TextConfig
    config_class = Inkling2TextConfig
    base_model_prefix = "model"
    _no_split_modules = ("SlidingDecoderLayer", "FullDecoderLayer")
    _keep_in_fp32_modules_strict = (
        "e_score_correction_bias",
        "mlp.gate.weight",
        "post_attention_convolution",
        "post_mlp_convolution",
        "sconv.conv1d",
        "attention_input",
        "mlp_input",
        "final_input",
    )

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, RelativePositionBias):
            init.normal_(module.proj, mean=0.0, std=std)
        elif isinstance(module, Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, ScaledClip):
            init.ones_(module.scale)
        elif isinstance(module, DynamicShortConvolution):
            init.zeros_(module.static_weight)
        elif isinstance(module, BlockAttentionResidual):
            init.zeros_(module.query)
        elif isinstance(module, ExpertLoad):
            init.zeros_(module.expert_load)
