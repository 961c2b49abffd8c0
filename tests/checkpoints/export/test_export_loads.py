"""Exports are read by others: compressed_tensors' own decompressor and packer, and transformers."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_folders import read_all, same_bytes
from torch import nn

import nybble
from nybble.checkpoints.dialects import WRITABLE
from nybble.checkpoints.export import ExportConfig, export
from nybble.checkpoints.hub import load_model
from nybble.checkpoints.load import ImportConfig, import_
from nybble.checkpoints.packed import encode
from nybble.checkpoints.quantize import QuantizeConfig, quantize_model
from nybble.checkpoints.safetensors_io import Folder
from nybble.errors import CheckpointError
from nybble.layers import convert

ct = pytest.importorskip("compressed_tensors", reason="compressed-tensors is a development extra")

WEIGHT_ONLY = {
    "name": "weight-only",
    "rule": [
        {"modules": "**", "all": "fp32"},
        {"modules": "**", "kind": "experts", "fprop": {"w": {"format": "nvfp4", "outer": "matrix"}}},
        {"modules": "**", "kind": "experts", "layers": {"last": 1}, "fprop": {"w": "mxfp8"}},
    ],
}
"""The weights of the inkling recipe's forward pass, activations as they are."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings of other libraries are theirs; so are their global tables, which `register` changes."""
    from transformers import conversion_mapping
    from transformers.quantizers import auto
    from transformers.utils import logging

    tables = [auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING]
    before = [dict(table) for table in tables]
    cache = conversion_mapping._checkpoint_conversion_mapping_cache
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
    conversion_mapping._checkpoint_conversion_mapping_cache = None if cache is None else dict(cache)


def tiny(kind: str) -> nn.Module:
    """A two-layer model with random FP32 weights."""
    torch.manual_seed(0)
    common = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.2,
    }  # fmt: skip
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**common, intermediate_size=96))
    if kind == "olmoe":
        from transformers import OlmoeConfig, OlmoeForCausalLM

        del common["head_dim"]
        return OlmoeForCausalLM(
            OlmoeConfig(**common, intermediate_size=96, num_experts=4, num_experts_per_tok=2)
        )
    if kind == "qwen3_moe":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            **common, intermediate_size=96, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2
        )
        return Qwen3MoeForCausalLM(config)
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2ForCausalLM

    return Inkling2ForCausalLM(
        Inkling2TextConfig(
            **common, unpadded_vocab_size=60, swa_num_attention_heads=2, swa_num_key_value_heads=1,
            swa_head_dim=32, moe_intermediate_size=96, n_routed_experts=4, num_experts_per_tok=2,
            sliding_window_size=8, rel_extent=8, d_rel=4, eos_token_id=1,
        )
    )  # fmt: skip


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(48).reshape(2, 24) % 60).logits


def load(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "mismatched_keys")), info
    return model


def test_a_plain_model_is_saved_as_ever_after_register(tmp_path: Path) -> None:
    """Saving reverses the rules of loading: those for quantised experts must not take part."""
    from nybble.checkpoints import hf

    model = tiny("inkling2")
    model.save_pretrained(tmp_path / "before")
    hf.register()
    model.save_pretrained(tmp_path / "after")
    expected = read_all(tmp_path / "before")
    got = read_all(tmp_path / "after")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    back = load(tmp_path / "after").state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


CASES = [
    (kind, format)
    for kind in ("olmoe", "qwen3_moe", "inkling2")
    for format in ("compressed-tensors", "modelopt")
]


@pytest.mark.parametrize(("kind", "format"), [*CASES, ("inkling2", "inkling2")])
def test_transformers_gives_the_logits_of_nybbles_forward(tmp_path: Path, kind: str, format: str) -> None:
    """Trained model -> export -> from_pretrained equals the converted model with the same operands.

    Tolerance: both multiply the same FP32 weights, the trainer (code * scale) and then the outer scale in the
    epilogue, transformers the product; sums over at most 96 terms in another order differ by a few FP32
    units.
    """
    from nybble.checkpoints.hf import register

    model = tiny(kind)
    model.save_pretrained(tmp_path / "model")
    exported = export(
        ExportConfig(
            checkpoint=tmp_path / "model", out=tmp_path / "out", format=format, recipe="inkling", rest="keep",
            scheme="w4a4" if kind == "olmoe" else "w4a16", progress=False,
        )
    )  # fmt: skip
    convert(model, WEIGHT_ONLY)
    register()
    got, expected = logits(load(exported.out)), logits(model)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert float((logits(load(tmp_path / "model")) - expected).abs().max()) > 0.01  # quantisation does show


def test_a_checkpoint_that_nybble_trained_is_what_its_forward_used(tmp_path: Path) -> None:
    """Our own model, trained a step with the recipe; tolerance as above."""
    from nybble.checkpoints.hf import register
    from nybble.checkpoints.validate import ValidateConfig, validate
    from nybble.models import Inkling2ForCausalLM
    from nybble.recipes import load_recipe

    model = Inkling2ForCausalLM(tiny("inkling2").config)
    convert(model, "inkling")
    ids = torch.arange(48).reshape(2, 24) % 60
    model.train()(input_ids=ids).logits.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    folder = tmp_path / "run" / "checkpoints" / "step_00000001" / "model"
    model.save_pretrained(folder)
    (folder / "recipe.toml").write_text(load_recipe("inkling").to_toml())
    convert(model, WEIGHT_ONLY)
    expected = logits(model)
    register()
    for format in WRITABLE:
        config = ExportConfig(
            checkpoint=folder.parent, out=tmp_path / format, format=format, rest="keep", progress=False
        )
        export(config)
        report = validate(ValidateConfig(checkpoint=tmp_path / format, against=folder.parent, progress=False))
        assert report.problems == []
        got = logits(load(tmp_path / format))
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("format", list(WRITABLE))
def test_imported_folder_loads_in_stock_transformers(tmp_path: Path, format: str) -> None:
    kind = "inkling2" if format == "inkling2" else "qwen3_moe"
    model = tiny(kind)
    model.save_pretrained(tmp_path / "model")
    config = ExportConfig(
        checkpoint=tmp_path / "model", out=tmp_path / "out", format=format, recipe="inkling", rest="keep",
        progress=False,
    )  # fmt: skip
    export(config)
    import_(ImportConfig(checkpoint=tmp_path / "out", out=tmp_path / "back", progress=False))
    convert(model, WEIGHT_ONLY)
    expected = logits(model)
    torch.testing.assert_close(
        logits(load(tmp_path / "back")), expected, rtol=0, atol=2e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize("format", list(WRITABLE))
def test_commands_that_run_a_model_say_how_to_bring_codes_back(tmp_path: Path, format: str) -> None:
    tiny("inkling2").save_pretrained(tmp_path / "model")
    export(
        ExportConfig(
            checkpoint=tmp_path / "model",
            out=tmp_path / "out",
            format=format,
            recipe="inkling",
            progress=False,
        )
    )
    with pytest.raises(CheckpointError, match=f"nybble import {tmp_path}/out --out NEW"):
        load_model(tmp_path / "out", recipe="inkling")


def bf16_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of two BF16 tensors of equal signs in units of the last place."""
    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()


def test_compressed_tensors_own_decompressor(make: Callable, tmp_path: Path) -> None:
    """Its result is BF16 of code * (scale / S_enc); ours is (code * scale) * (1 / S_enc).

    Two FP32 roundings in another order can end on either side of a BF16 tie, hence one BF16 unit on a few
    values.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source = make(layers=6)
    export(ExportConfig(checkpoint=source, out=tmp_path / "out", recipe="inkling", progress=False))
    folder = Folder.open(tmp_path / "out")
    config = QuantizationConfig.model_validate(folder.config["quantization_config"])
    schemes = {scheme.format: scheme for scheme in config.config_groups.values()}
    off = total = 0
    for item in WRITABLE["compressed-tensors"]().find(folder):
        format = "mxfp8-quantized" if item.kind == "mxfp8" else "nvfp4-pack-quantized"
        state = {name.rpartition(".")[2]: folder.read(name) for name in item.tensors}
        theirs = BaseCompressor.get_value_from_registry(format).decompress(state, schemes[format])["weight"]
        ours = item.load(folder).decode(torch.bfloat16)
        steps = bf16_steps(theirs.bfloat16(), ours)
        assert int(steps.max()) <= 1, item.module
        off, total = off + int((steps > 0).sum()), total + steps.numel()
        if item.kind == "mxfp8":
            assert not steps.any()
    assert off / total < 1e-4


def test_compressed_tensors_converts_the_folder_and_stock_transformers_loads_it(tmp_path: Path) -> None:
    """It decodes to BF16, so the reference is our import in BF16; a few weights may be one BF16 unit apart
    (see above), which moves logits by less than 1e-3 of their range.
    """
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint

    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    export(
        ExportConfig(checkpoint=tmp_path / "model", out=out, recipe="inkling", rest="keep", progress=False)
    )
    converter = CompressedTensorsDequantizer(str(out), dtype=torch.float32)
    convert_checkpoint(str(out), str(tmp_path / "dense"), converter, max_workers=1)
    import_(ImportConfig(checkpoint=out, out=tmp_path / "back", dtype="bfloat16", progress=False))
    expected = logits(load(tmp_path / "back"))
    got = logits(load(tmp_path / "dense"))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_stock_transformers_loads_quantised_linears(tmp_path: Path) -> None:
    """A dense model needs nothing of ours. Reference and tolerance as above: compressed_tensors decodes to
    BF16.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    config = QuantizeConfig(model=tmp_path / "model", out=tmp_path / "out", scope="all", progress=False)
    quantize_model(config)
    import_(
        ImportConfig(checkpoint=tmp_path / "out", out=tmp_path / "back", dtype="bfloat16", progress=False)
    )
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    expected = logits(load(tmp_path / "back"))
    torch.testing.assert_close(logits(stock), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_outer_scale_and_packing_are_those_of_compressed_tensors() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from compressed_tensors.quantization.utils import generate_gparam

    weight = torch.randn(48, 64) * 0.03
    packed = encode(weight, "nvfp4")
    assert packed.divisor is not None
    assert torch.equal(packed.divisor.reshape(1), generate_gparam(weight.min(), weight.max()))
    values = unpack_fp4_from_uint8(packed.codes, 48, 64, dtype=torch.float32)
    q = nybble.quantize(weight, "nvfp4")
    scales = packed.scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    assert same_bytes(values * scales, q.dequantize(apply_outer=False))
    assert torch.equal(pack_fp4_to_uint8(values), packed.codes)


def test_compressed_tensors_takes_modelopt_apart_as_we_do(make: Callable, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    source = make(layers=1)
    for format in ("compressed-tensors", "modelopt"):
        recipe = {"name": "r", "rule": [{"modules": "**", "kind": "experts", "fprop": {"w": "nvfp4"}}]}
        (tmp_path / "r.toml").write_text(nybble.load_recipe(recipe).to_toml())
        config = ExportConfig(
            checkpoint=source, out=tmp_path / format, format=format, recipe=str(tmp_path / "r.toml"),
            scheme="w4a4", progress=False,
        )  # fmt: skip
        export(config)
    converted = ModelOptNvfp4Converter(targets=["re:.*experts.*"]).process(read_all(tmp_path / "modelopt"))
    ours = read_all(tmp_path / "compressed-tensors")
    assert set(converted) == set(ours)
    for name, tensor in ours.items():
        other = converted[name].reshape(tensor.shape)
        if name.endswith("weight_global_scale"):  # it inverts S_dec, which may miss S_enc by a unit
            torch.testing.assert_close(other, tensor, rtol=2e-7, atol=0)
        else:
            assert same_bytes(other, tensor), name
