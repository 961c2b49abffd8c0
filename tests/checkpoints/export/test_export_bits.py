"""What an export writes is what the forward pass used: codes, block scales and outer scales, in every
dialect.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_folders import WIDTH, E, H, read_all, relayout, same_bytes, save, weights

import nybble
from nybble.checkpoints import plan
from nybble.checkpoints.dialects import WRITABLE
from nybble.checkpoints.engine import CHUNK_BYTES
from nybble.checkpoints.export import ExportConfig, export
from nybble.checkpoints.packed import Packed, encode, reciprocal
from nybble.checkpoints.safetensors_io import INDEX_NAME, Folder
from nybble.checkpoints.source import find_units
from nybble.errors import CheckpointError
from nybble.formats.fp32 import divide
from nybble.recipes import load_recipe

LAYOUTS = ("fused", "interleaved", "separate")


def run(source: Path, out: Path, format: str = "compressed-tensors", **options) -> dict[str, torch.Tensor]:
    options = {"recipe": "inkling", "progress": False, **options}
    export(ExportConfig(checkpoint=source, out=out, format=format, **options))
    return read_all(out)


def trainer(layer: int, fused: dict[str, torch.Tensor]) -> tuple[nybble.QTensor, nybble.QTensor]:
    """The trainer's quantised gate_up and down of one expert; the last sixth of six layers is MXFP8."""
    format = "mxfp8" if layer == 5 else "nvfp4"
    bank = f"model.layers.{layer}.mlp.experts"
    return tuple(
        nybble.quantize(fused[f"{bank}.{leaf}"], format, axis=-1, outer="matrix")
        for leaf in ("gate_up_proj", "down_proj")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_tensors_holds_the_trainers_bytes(make: Callable, tmp_path: Path, layout: str) -> None:
    got, fused = run(make(layout), tmp_path / "out"), weights()
    for layer in range(6):
        for e in range(E):
            up, down = trainer(layer, fused)
            for part, q, rows in (
                ("gate_proj", up, slice(0, WIDTH)),
                ("up_proj", up, slice(WIDTH, None)),
                ("down_proj", down, slice(None)),
            ):
                name = f"model.layers.{layer}.mlp.experts.{e}.{part}"
                if layer == 5:
                    assert got[f"{name}.weight"].dtype == torch.float8_e4m3fn
                    assert torch.equal(got[f"{name}.weight"].view(torch.uint8), q.codes[e, rows])
                    assert torch.equal(got[f"{name}.weight_scale"], q.scales[e, rows])
                    assert f"{name}.weight_global_scale" not in got
                else:
                    assert torch.equal(got[f"{name}.weight_packed"], q.codes[e, rows])
                    assert got[f"{name}.weight_scale"].dtype == torch.float8_e4m3fn
                    assert torch.equal(got[f"{name}.weight_scale"].view(torch.uint8), q.scales[e, rows])
                    assert torch.equal(got[f"{name}.weight_global_scale"], q.encode_scale[e : e + 1])
                assert f"{name}.input_global_scale" not in got
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
        assert same_bytes(got[name], fused[name].bfloat16())
    assert same_bytes(got["model.layers.0.mlp.gate.bias"], fused["model.layers.0.mlp.gate.bias"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", list(WRITABLE))
def test_every_dialect_decodes_to_the_trainers_weights(
    make: Callable, tmp_path: Path, layout: str, format: str
) -> None:
    run(make(layout), tmp_path / "out", format)
    folder, fused = Folder.open(tmp_path / "out"), weights()
    stored = {item.module: item for item in WRITABLE[format]().find(folder)}
    for layer in range(6):
        for e in range(E):
            up, down = (q.dequantize()[e] for q in trainer(layer, fused))
            bank = f"model.layers.{layer}.mlp.experts"
            if format == "inkling2":
                w13 = stored[f"{bank}.w13"].load(folder, e).decode()
                parts = [w13[0::2], w13[1::2], stored[f"{bank}.w2"].load(folder, e).decode()]
            else:
                names = ("gate_proj", "up_proj", "down_proj")
                parts = [stored[f"{bank}.{e}.{name}"].load(folder).decode() for name in names]
            assert same_bytes(torch.cat(parts[:2]), up)
            assert same_bytes(parts[2], down)


def test_inkling2_reader_of_transformers_decodes_to_the_same_bits(make: Callable, tmp_path: Path) -> None:
    from transformers.core_model_loading import Inkling2LoopDequantizeExperts

    got, fused = run(make(), tmp_path / "out", "inkling2"), weights()
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.empty(1))
    for layer in range(6):
        name = f"model.layers.{layer}.mlp.experts.w2_weight"
        keys = [
            name,
            *(f"{name}{s}" for s in ("_scale", "_amax", "_outer_scale_denominator") if f"{name}{s}" in got),
        ]
        every = [name, f"{name}_scale", f"{name}_amax", f"{name}_outer_scale_denominator"]
        out = Inkling2LoopDequantizeExperts().convert(
            {key: got[key] for key in keys}, every, ["w"], model=model, full_layer_name="w"
        )
        assert same_bytes(out["w"], trainer(layer, fused)[1].dequantize())


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_w4a4_gives_every_expert_an_input_scale(make: Callable, tmp_path: Path, format: str) -> None:
    got = run(make(experts=5), tmp_path / "out", format, scheme="w4a4")
    leaf = "input_global_scale" if format == "compressed-tensors" else "input_scale"
    found = [name for name in got if name.endswith(leaf)]
    assert len(found) == 5 * 5 * 3
    assert all(got[name].item() == 1.0 for name in found)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    dynamic = config["config_groups"]["group_0"]["input_activations"]["dynamic"]
    assert dynamic == ("local" if format == "compressed-tensors" else False)


def test_modelopt_weight_only_still_has_input_scales(make: Callable, tmp_path: Path) -> None:
    got = run(make(), tmp_path / "out", "modelopt")
    assert sum(name.endswith(".input_scale") for name in got) == 5 * E * 3
    quant = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= set(quant)
    assert quant["quantized_layers"]["model.layers.5.mlp.experts.2.up_proj"]["quant_algo"] == "MXFP8"
    assert quant["quantized_layers"]["model.layers.4.mlp.experts.2.up_proj"]["quant_algo"] == "W4A16_NVFP4"
    assert got["model.layers.0.mlp.experts.0.up_proj.weight_scale_2"].shape == ()


def test_linears_follow_the_recipe_when_asked(make: Callable, tmp_path: Path) -> None:
    source = make()
    got, fused = run(source, tmp_path / "out", linears="recipe"), weights()
    q = nybble.quantize(fused["model.layers.0.self_attn.q_proj.weight"], "mxfp8")
    assert torch.equal(got["model.layers.0.self_attn.q_proj.weight"].view(torch.uint8), q.codes)
    assert got["lm_head.weight"].dtype == got["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="experts only"):
        run(source, tmp_path / "out2", "inkling2", linears="recipe")


def test_square_tiles_and_four_over_six_reach_the_disk_as_the_trainer_decodes_them() -> None:
    weight = weights()["model.layers.0.mlp.experts.gate_up_proj"][:, :-3]  # a last tile of 13 rows
    for format in (
        "nvfp4",
        "nvfp4-4over6",
        "nvfp4-16x16",
        "nvfp4-16x16-4over6",
        "mxfp4",
        "mxfp8",
        "mxfp8-floor",
    ):
        packed = encode(weight, format)
        assert same_bytes(packed.decode(), nybble.quantize(weight, format, outer="matrix").dequantize()), (
            format
        )
        assert packed.scales.shape[-2] == weight.shape[-2]


def test_reciprocal_finds_the_number_whose_reciprocal_is_the_scale() -> None:
    amax = torch.logspace(-8, 4, 4001)
    encode_scale = divide(2688.0, amax)
    decode_scale = divide(1.0, encode_scale)
    assert torch.equal(divide(1.0, reciprocal(decode_scale)), decode_scale)


def test_power_of_two_denominator_is_needed_for_exact_outer_scales() -> None:
    """The reason of the inkling2 dialect's denominator: amax / 2688 misses many of the trainer's scales."""
    amax = torch.logspace(-6, 3, 20001)
    wanted = divide(1.0, divide(2688.0, amax))
    assert 0.05 < float((divide(amax, torch.full_like(amax, 2688.0)) != wanted).float().mean()) < 0.6
    assert torch.equal(divide(wanted * 2048.0, torch.full_like(amax, 2048.0)), wanted)


def test_shards_are_split_indexed_and_equal_to_one_file(make: Callable, tmp_path: Path) -> None:
    source = make()
    whole = run(source, tmp_path / "one")
    parts = run(source, tmp_path / "many", max_shard_gb=1e-4)
    index = json.loads((tmp_path / "many" / INDEX_NAME).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 5
    assert files == {path.name for path in (tmp_path / "many").glob("*.safetensors")}
    assert set(index["weight_map"]) == set(whole) == set(parts)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in parts.values())
    assert all(same_bytes(whole[name], parts[name]) for name in whole)


def test_source_shards_and_chunks_of_experts_change_nothing(
    make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("fused", experts=7)
    expected = run(source, tmp_path / "a")
    split = save(tmp_path / "split", relayout(read_all(source), "fused"), Folder.open(source).config, 300_000)
    assert len(list(split.glob("*.safetensors"))) > 3
    assert CHUNK_BYTES > 1_000_000
    monkeypatch.setattr("nybble.checkpoints.engine.CHUNK_BYTES", 500_000)
    got = run(split, tmp_path / "b")
    assert all(same_bytes(expected[name], got[name]) for name in expected)


def test_a_full_disk_leaves_no_folder_and_keeps_the_old_one(
    make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    run(source, tmp_path / "out")
    before = read_all(tmp_path / "out")
    real, calls = os.pwritev, []

    def full(*args):
        calls.append(args)
        if len(calls) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(source, tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    after = read_all(tmp_path / "out")
    assert all(same_bytes(before[name], after[name]) for name in before)


def test_an_existing_folder_is_left_alone(make: Callable, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="--overwrite"):
        run(make(), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "bf16"}, "nothing to export"),
        ({"recipe": None}, "--recipe"),
        ({"recipe": "mxfp4", "format": "modelopt"}, "cannot hold mxfp4"),
        ({"format": "gguf"}, "unknown dialect"),
        ({"max_shard_gb": 0.0}, "max_shard_gb"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    make: Callable, tmp_path: Path, options: dict, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        run(make(), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", list(WRITABLE))
def test_a_quantised_folder_must_be_imported_first(make: Callable, tmp_path: Path, format: str) -> None:
    run(make(layers=2), tmp_path / "a", format)
    with pytest.raises(CheckpointError, match="nybble import"):
        run(tmp_path / "a", tmp_path / "b")


def test_a_width_that_cuts_a_block_is_named(make: Callable, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts: 24 input features"):
        run(make(width=24), tmp_path / "out")


def test_odd_numbers_of_rows_and_experts(make: Callable, tmp_path: Path) -> None:
    got = run(make(width=32, hidden=32, experts=1, layers=1), tmp_path / "a")
    assert got["model.layers.0.mlp.experts.0.gate_proj.weight"].shape == (32, 32)
    weight = torch.randn(3, 33, 48)
    packed = encode(weight, "nvfp4")
    assert isinstance(packed, Packed)
    assert packed.shape == (3, 33, 48)


def test_a_weight_with_nan_is_named(make: Callable, tmp_path: Path) -> None:
    source = make("fused", layers=2)
    tensors = read_all(source)
    tensors["model.layers.1.mlp.experts.down_proj"][1, 2, 3] = float("nan")
    save(tmp_path / "bad", tensors, Folder.open(source).config)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts: .*NaN"):
        run(tmp_path / "bad", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_expert_is_named(make: Callable, tmp_path: Path) -> None:
    source = make()
    tensors = read_all(source)
    del tensors["model.layers.2.mlp.experts.1.up_proj.weight"]
    save(tmp_path / "bad", tensors, Folder.open(source).config)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.1\.up_proj"):
        run(tmp_path / "bad", tmp_path / "out")


def test_stochastic_weights_and_shared_outer_scales_cannot_be_exported(
    make: Callable, tmp_path: Path
) -> None:
    source = make()
    for weight, words in (
        ({"format": "nvfp4", "rounding": "stochastic"}, "stochastically"),
        ({"format": "nvfp4", "outer": "tensor"}, 'outer = "matrix"'),
    ):
        recipe = load_recipe(
            {"name": "x", "rule": [{"modules": "**", "kind": "experts", "fprop": {"w": weight}}]}
        )
        (tmp_path / "x.toml").write_text(recipe.to_toml())
        with pytest.raises(CheckpointError, match=words):
            run(source, tmp_path / "out", recipe=str(tmp_path / "x.toml"))


def test_the_plan_of_a_recipe_is_that_of_the_model(make: Callable) -> None:
    """Formats found from file names alone equal those that `resolve` gives the model's modules."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from nybble.recipes import resolve

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=H, moe_intermediate_size=WIDTH, num_experts=E, num_hidden_layers=6,
        head_dim=16, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        table = resolve(load_recipe("inkling"), Qwen3MoeForCausalLM(config))
    units = find_units(Folder.open(make()))
    chosen = plan.from_recipe(load_recipe("inkling"), units, linears=True)
    for row in table.rows:
        if row.name.endswith(("experts", "q_proj", "k_proj", "lm_head")):
            expected = "bf16" if row.protected else row.gemms.fprop.w.format
            assert chosen.get(row.name, "bf16") == expected, row.name


def test_overwrite_replaces_models_alone(make: Callable, tmp_path: Path) -> None:
    """Never the source, a run, or what somebody keeps under that name."""
    source = make()
    with pytest.raises(CheckpointError, match="holds the source"):
        run(source, source, recipe="inkling", overwrite=True)
    assert read_all(source)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a folder with a model"):
        run(source, kept, recipe="inkling", overwrite=True)
    assert (kept / "thesis.txt").read_text() == "years of work"
    out = tmp_path / "out"
    run(source, out, recipe="inkling")
    run(source, out, recipe="inkling", overwrite=True)
