"""Teach transformers to load every dialect with the right values: `register()`, then `from_pretrained` as
usual.

transformers 5.24 by itself loads compressed-tensors linears, but not experts: it decodes NVFP4 experts
without their `weight_global_scale` and says nothing (transformers#48371), stops at MXFP8 experts, knows no
quant_method "modelopt", and reads Inkling 2's own four-bit tensors for the looped variant only. Weights are
decoded to the type of the model while they load; this is for evaluation and further training, not for speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Inkling2LoopDequantizeExperts,
    Interleave,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    _IdentityOp,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nybble.checkpoints.packed import Packed
from nybble.errors import CheckpointError
from nybble.formats.fp32 import divide

_COMPANIONS = ("weight_scale", "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale")


def register() -> None:
    """Make `from_pretrained` load the dialects in this process. Calling it again changes nothing."""
    for method in ("compressed-tensors", "modelopt"):
        AUTO_QUANTIZER_MAPPING[method] = _Quantizer
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _Config
    stock = conversion_mapping._build_checkpoint_conversion_mapping()
    saved = {rule._original_target_patterns[0]: rule for rule in stock["inkling2_text"]}
    experts = [
        _LoadOnly(
            source_patterns=[rf"mlp\.experts\.{leaf}_weight{suffix}" for suffix in _INKLING],
            target_patterns=f"mlp.experts.{target}",
            operations=[Inkling2LoopDequantizeExperts(), *more],
        )
        for leaf, target, more in (("w13", "gate_up_proj", [Interleave(dim=1)]), ("w2", "down_proj", []))
    ]
    for rule in experts:
        rule.saved_by = saved[rule._original_target_patterns[0]]
    separate = [
        _LoadOnly(
            source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        _LoadOnly(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
    rest = [
        rule
        for rule in stock["inkling2_text"]
        if not rule._original_source_patterns[0].startswith(r"mlp\.experts\.w")
    ]
    mapping = [*experts, *separate, *rest]
    conversion_mapping.register_checkpoint_conversion_mapping("inkling2_text", mapping, overwrite=True)


_INKLING = ("", "_scale", "_amax", "_outer_scale_denominator")


class _LoadOnly(WeightConverter):
    """Has no part in saving, which transformers does by the reverse of every rule."""

    saved_by: WeightTransform | None = None
    """The rule of transformers whose reverse saves what this one loads."""

    def reverse_transform(self) -> WeightTransform:
        if self.saved_by is not None:
            return self.saved_by.reverse_transform()
        return WeightRenaming("no weight has this name", "nor this")


class _Config(QuantizationConfigMixin):
    """Any quantization_config, kept as it is."""

    def __init__(self, quant_method: str, **rest: Any) -> None:
        self.quant_method = quant_method
        self.rest = rest
        self.dequantize = True

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        config = cls(**config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, **self.rest}


class _Quantizer(HfQuantizer):
    """Decodes every quantised matrix while it loads."""

    requires_calibration = True
    serialized_names = {"weight": ["weight", "weight_packed", *_COMPANIONS]}  # noqa: RUF012  its base has it so

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": _Decode}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Decode(ConversionOps):
    """Serialised tensors of one linear, or of all experts of a layer, to weights."""

    def __init__(self, hf_quantizer: HfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],  # noqa: ARG002
        target_patterns: list[str],  # noqa: ARG002
        full_layer_name: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        dtype = kwargs["model"].get_parameter(full_layer_name).dtype
        out: dict[str, Any] = {}
        for key, value in input_dict.items():
            base, _, leaf = (
                key.rpartition("weight_packed") if "weight_packed" in key else key.rpartition("weight")
            )
            if leaf or key.endswith(_COMPANIONS):
                continue
            values = value if isinstance(value, list) else [value]
            parts = {name: _list(input_dict.get(base + name)) for name in _COMPANIONS}
            dense = [
                _decode(codes, {name: part[i] for name, part in parts.items() if i < len(part)}).to(dtype)
                for i, codes in enumerate(values)
            ]
            if base:
                out[key] = dense if isinstance(value, list) else dense[0]
            else:
                assert full_layer_name is not None
                out[full_layer_name] = dense[0]
        return out

    @property
    def reverse_op(self) -> ConversionOps:
        return _IdentityOp()


def _list(value: Any) -> list[Tensor]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _decode(codes: Tensor, parts: dict[str, Tensor]) -> Tensor:
    scale = parts.get("weight_scale")
    if scale is None or (codes.is_floating_point() and codes.itemsize > 1):
        return codes
    if codes.dtype == torch.float8_e4m3fn:
        kind = "mxfp8"
    else:
        kind = "nvfp4" if scale.dtype == torch.float8_e4m3fn else "mxfp4"
    multiplier = parts.get("weight_scale_2")
    if "weight_global_scale" in parts:
        multiplier = divide(1.0, parts["weight_global_scale"])
    if kind == "nvfp4" and multiplier is None:
        raise CheckpointError("an NVFP4 matrix has no outer scale; `nybble validate` names it")
    return Packed(
        kind=kind,
        codes=codes.view(torch.uint8).contiguous(),
        scales=scale.view(torch.uint8).contiguous(),
        multiplier=None if multiplier is None else multiplier.reshape(()),
        divisor=None,
    ).decode()
