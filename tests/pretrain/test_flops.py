"""What MFU is counted from, and settings of captured steps that make no sense."""

import pytest
import torch

from nybble.errors import ConfigError
from nybble.models import Inkling2ForCausalLM, presets
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.flops import bf16_peak, model_flops
from nybble.pretrain.start import pretrain


def test_a_token_costs_six_operations_a_parameter_of_its_products_and_its_attention():
    config = presets.get("tiny").model_config()
    with torch.device("meta"):
        model = Inkling2ForCausalLM(config)
    H, width, k, layers = 192, 192, config.num_experts_per_tok, config.num_hidden_layers
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    experts = layers * k * 3 * H * width
    sliding = sum(kind == "hybrid_sliding" for kind in config.layer_types)
    attention = 12 * 192 * (sliding * 64 + (layers - sliding) * 128)
    assert model_flops(model, 256) == 6 * (linear + experts) + attention


def test_no_peak_is_claimed_for_a_cpu():
    assert bf16_peak(torch.device("cpu")) is None


def test_graph_needs_a_gpu_and_no_compiler(tmp_path):
    with pytest.raises(ConfigError, match="graph and compile"):
        PretrainConfig(preset="tiny", graph=True, compile=True)
    with pytest.raises(ConfigError, match="works on GPUs"):
        pretrain(PretrainConfig(preset="tiny", graph=True, device="cpu", data=tmp_path))
