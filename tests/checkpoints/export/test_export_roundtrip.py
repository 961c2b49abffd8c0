"""Import gives back what was exported: weights to the bit, and codes byte for byte when the model is exported
again.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_folders import WIDTH, E, H, read_all, relayout, same_bytes, save, weights

import nybble
from nybble.checkpoints.dialects import WRITABLE
from nybble.checkpoints.export import ExportConfig, export
from nybble.checkpoints.load import ImportConfig, import_
from nybble.checkpoints.packed import encode
from nybble.checkpoints.safetensors_io import Folder
from nybble.errors import CheckpointError


def write(source: Path, out: Path, format: str, **options) -> Path:
    return export(ExportConfig(checkpoint=source, out=out, format=format, progress=False, **options)).out


def read(source: Path, out: Path, **options) -> Path:
    return import_(ImportConfig(checkpoint=source, out=out, progress=False, **options)).out


@pytest.mark.parametrize("model_type", ["qwen3_moe", "inkling2_text"])
@pytest.mark.parametrize("first", list(WRITABLE))
def test_codes_survive_import_and_export_into_every_dialect(
    make: Callable, tmp_path: Path, model_type: str, first: str
) -> None:
    source = make("interleaved" if model_type == "inkling2_text" else "separate", model_type)
    original = {
        format: read_all(write(source, tmp_path / format, format, recipe="inkling")) for format in WRITABLE
    }
    imported = read(tmp_path / first, tmp_path / "imported")
    for format in WRITABLE:
        again = read_all(write(imported, tmp_path / f"again-{format}", format))
        assert set(again) == set(original[format])
        for name, tensor in original[format].items():
            # 1/S_dec has two FP32 neighbours that invert to the same S_dec, so the divisor itself may differ
            if first != "compressed-tensors" and name.endswith("weight_global_scale"):
                assert torch.equal(1 / again[name], 1 / tensor), name
            else:
                assert same_bytes(again[name], tensor), name


@pytest.mark.parametrize("format", list(WRITABLE))
@pytest.mark.parametrize("model_type", ["qwen3_moe", "inkling2_text"])
def test_imported_weights_are_the_trainers(
    make: Callable, tmp_path: Path, format: str, model_type: str
) -> None:
    source = make("interleaved" if model_type == "inkling2_text" else "separate", model_type)
    got = read_all(read(write(source, tmp_path / "x", format, recipe="inkling", rest="keep"), tmp_path / "y"))
    expected = {}
    for name, tensor in weights().items():
        leaf = name.rpartition(".")[2]
        if leaf in ("gate_up_proj", "down_proj"):
            kind = "mxfp8" if ".5." in name else "nvfp4"
            tensor = nybble.quantize(tensor, kind, outer="matrix").dequantize()
        expected[name] = tensor
    expected = relayout(expected, "interleaved" if model_type == "inkling2_text" else "separate")
    if model_type == "inkling2_text":
        expected = {n.replace("model.", "model.llm.", 1): t for n, t in expected.items()}
    assert set(got) == set(expected)
    assert all(same_bytes(got[name], tensor) for name, tensor in expected.items())


def test_rounding_again_is_not_enough_to_keep_codes() -> None:
    """Why codes are kept: where block scales are subnormal in E4M3 a second rounding moves the weights."""
    weight = torch.randn(64, 256) * torch.logspace(-6, 0, 64)[:, None]
    packed = encode(weight, "nvfp4")
    again = encode(packed.decode(), "nvfp4")
    assert not torch.equal(packed.codes, again.codes)


def test_trained_weights_are_quantised_afresh_and_untouched_ones_keep_their_codes(
    make: Callable, tmp_path: Path
) -> None:
    first = write(make(), tmp_path / "a", "modelopt", recipe="inkling")
    imported = read(first, tmp_path / "b")
    tensors = read_all(imported)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    moved = tensors[name] + 0.01 * torch.randn(H, WIDTH)
    folder = Folder.open(imported)
    folder.path.joinpath("model.safetensors").unlink()
    save(imported, {**tensors, name: moved}, folder.config)
    again, before = read_all(write(imported, tmp_path / "c", "modelopt")), read_all(first)
    changed = {n.rpartition(".")[0] for n in before if not same_bytes(before[n], again[n])}
    assert changed == {name.removesuffix(".weight")}
    assert torch.equal(again[name], encode(moved, "nvfp4").codes)


def test_foreign_codes_with_head_room_and_unequal_gate_and_up_survive(make: Callable, tmp_path: Path) -> None:
    """A calibrated checkpoint's outer scale is no amax / 2688; the bytes come back all the same."""
    first = write(make(layers=2), tmp_path / "a", "compressed-tensors", recipe="inkling")
    tensors = read_all(first)
    for name in tensors:
        if name.endswith("weight_global_scale"):
            tensors[name] = tensors[name] * 0.7310
    foreign = save(tmp_path / "foreign", tensors, Folder.open(first).config)
    again = read_all(write(read(foreign, tmp_path / "b"), tmp_path / "c", "compressed-tensors"))
    assert all(same_bytes(again[name], tensor) for name, tensor in tensors.items())


def test_import_in_bf16_keeps_codes_too(make: Callable, tmp_path: Path) -> None:
    first = write(make(layers=2), tmp_path / "a", "inkling2", recipe="inkling")
    imported = read(first, tmp_path / "b", dtype="bfloat16")
    assert read_all(imported)["model.layers.0.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16
    again, before = read_all(write(imported, tmp_path / "c", "inkling2")), read_all(first)
    assert all(same_bytes(again[name], tensor) for name, tensor in before.items())


def test_bf16_banks_change_layout_with_the_dialect(make: Callable, tmp_path: Path) -> None:
    rule = {"modules": "**", "kind": "experts", "layers": {"first": 1}, "fprop": {"w": "nvfp4"}}
    from nybble.recipes import load_recipe

    (tmp_path / "r.toml").write_text(load_recipe({"name": "r", "rule": [rule]}).to_toml())
    for model_type, layout in (("inkling2_text", "interleaved"), ("qwen3_moe", "separate")):
        source = make(layout, model_type, name=model_type, layers=2)
        for format in WRITABLE:
            first = write(source, tmp_path / f"{model_type}{format}", format, recipe=str(tmp_path / "r.toml"))
            got, want = read_all(read(first, tmp_path / f"{model_type}{format}-back")), read_all(source)
            assert set(got) == set(want)
            for name, tensor in want.items():
                if ".layers.1." in name and not name.endswith("gate.bias"):
                    assert same_bytes(got[name], tensor.bfloat16()), name


def test_gpt_oss_mxfp4_decodes_as_transformers_does(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(0)
    tensors, bank = {}, "model.layers.0.mlp.experts"
    for leaf, rows in (("gate_up_proj", 40), ("down_proj", 64)):
        tensors[f"{bank}.{leaf}_blocks"] = torch.randint(
            0, 256, (E, rows, 2, 16), generator=g, dtype=torch.uint8
        )
        tensors[f"{bank}.{leaf}_scales"] = torch.randint(
            100, 130, (E, rows, 2), generator=g, dtype=torch.uint8
        )
        tensors[f"{bank}.{leaf}_bias"] = torch.randn(E, rows, generator=g).bfloat16()
    folder = save(
        tmp_path / "oss", tensors, {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    )
    got = read_all(read(folder, tmp_path / "out"))
    for leaf in ("gate_up_proj", "down_proj"):
        expected = convert_moe_packed_tensors(
            tensors[f"{bank}.{leaf}_blocks"], tensors[f"{bank}.{leaf}_scales"], dtype=torch.float32
        )
        assert torch.equal(got[f"{bank}.{leaf}"], expected)
        assert same_bytes(got[f"{bank}.{leaf}_bias"], tensors[f"{bank}.{leaf}_bias"])
    assert "quantization_config" not in Folder.open(tmp_path / "out").config


@pytest.mark.parametrize("mx", [False, True])
def test_fp8_folders_are_decoded(tmp_path: Path, mx: bool) -> None:
    weight = torch.randn(130, 288)
    q = nybble.quantize(weight, "mxfp8" if mx else "fp8-128x128")
    tensors = {
        "a.weight": q.codes.view(torch.float8_e4m3fn),
        "a.weight_scale_inv": q.scales,
        "b": torch.ones(3),
    }
    folder = save(
        tmp_path / "in", tensors, {"quantization_config": {"quant_method": "mxfp8" if mx else "fp8"}}
    )
    got = read_all(read(folder, tmp_path / "out"))
    assert torch.equal(got["a.weight"], q.dequantize())
    assert set(got) == {"a.weight", "b"}


def test_a_bf16_folder_is_copied(make: Callable, tmp_path: Path) -> None:
    source = make(layers=1)
    got, want = read_all(read(source, tmp_path / "out")), read_all(source)
    assert set(got) == set(want)
    assert all(same_bytes(got[name], want[name]) for name in want)


def test_a_missing_scale_stops_the_import(make: Callable, tmp_path: Path) -> None:
    first = write(make(layers=2), tmp_path / "a", "modelopt", recipe="inkling")
    tensors = read_all(first)
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale_2"]
    bad = save(tmp_path / "bad", tensors, Folder.open(first).config)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight_scale_2"):
        read(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_decodes_to_nan_stops_the_import(make: Callable, tmp_path: Path) -> None:
    first = write(make(layers=2), tmp_path / "a", "compressed-tensors", recipe="inkling")
    tensors = read_all(first)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x7F
    bad = save(tmp_path / "bad", tensors, Folder.open(first).config)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj.*NaN"):
        read(bad, tmp_path / "out")
