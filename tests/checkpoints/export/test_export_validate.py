"""`validate` is silent on sound folders and names each known fault."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_folders import read_all, save

from nybble.checkpoints.dialects import WRITABLE
from nybble.checkpoints.export import ExportConfig, export
from nybble.checkpoints.quantize import QuantizeConfig, quantize_model
from nybble.checkpoints.safetensors_io import INDEX_NAME, Folder
from nybble.checkpoints.validate import Report, ValidateConfig, validate
from nybble.errors import CheckpointError

CT, MO, INK = "compressed-tensors", "modelopt", "inkling2"
UP = "model.layers.0.mlp.experts.1.up_proj"
STACK = "model.layers.0.mlp.experts.w13_weight"


def check(folder: Path, **options) -> Report:
    return validate(ValidateConfig(checkpoint=folder, progress=False, **options))


@pytest.fixture
def broken(make: Callable, tmp_path: Path) -> Callable[..., Report]:
    """`broken(format, change)` exports, lets `change` alter the tensors and the config, and validates."""

    def broken(format: str, change: Callable[[dict, dict], None], **options) -> Report:
        source = make(layers=2)
        export(
            ExportConfig(
                checkpoint=source, out=tmp_path / "good", format=format, recipe="inkling", progress=False
            )
        )
        tensors, config = read_all(tmp_path / "good"), Folder.open(tmp_path / "good").config
        change(tensors, config)
        bad = save(tmp_path / "bad", {n: t.contiguous() for n, t in tensors.items()}, config)
        if options.pop("compare", False):
            options["against"] = source
        return check(bad, **options)

    return broken


@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
@pytest.mark.parametrize("format", list(WRITABLE))
def test_exports_are_sound_and_equal_to_their_source(
    make: Callable, tmp_path: Path, format: str, scheme: str
) -> None:
    source = make()
    export(
        ExportConfig(
            checkpoint=source,
            out=tmp_path / "out",
            format=format,
            recipe="inkling",
            scheme=scheme,
            progress=False,
        )
    )
    report = check(tmp_path / "out", against=source, tp=1)
    assert report.problems == []
    assert report.status == 0
    assert "sound" in report.text()


@pytest.mark.parametrize("weights", ["nvfp4", "nvfp4-4over6", "mxfp8"])
@pytest.mark.parametrize("format", [CT, MO])
def test_quantised_models_are_sound_with_fused_scales_shared(
    make: Callable, tmp_path: Path, format: str, weights: str
) -> None:
    config = QuantizeConfig(
        model=make(layers=2),
        out=tmp_path / "out",
        format=format,
        weights=weights,
        scope="all",
        progress=False,
    )
    quantize_model(config)
    assert check(tmp_path / "out").problems == []
    if weights == "nvfp4" and format == CT:
        got = read_all(tmp_path / "out")
        scales = [got[f"model.layers.0.self_attn.{p}_proj.weight_global_scale"] for p in "qk"]
        assert torch.equal(*scales)


def nothing(_tensors: dict, _config: dict) -> None:
    pass


def invert(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, _: tensors.update({name: 1 / tensors[name]})


def edit(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[dict, dict], None]:
    """Change a tensor's bytes in place, or replace it by what `change` returns."""

    def run(tensors: dict, _: dict) -> None:
        result = change(tensors[name])
        if isinstance(result, torch.Tensor):
            tensors[name] = result

    return run


def poke(value: int) -> Callable[[torch.Tensor], None]:
    def run(tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8).view(-1)[3] = value

    return run


def drop(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, _: tensors.__delitem__(name)


def swap(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor << 4) | (tensor >> 4)


FAULTS = [
    (CT, invert(f"{UP}.weight_global_scale"), "reciprocal", UP),
    (MO, invert(f"{UP}.weight_scale_2"), "reciprocal", UP),
    (CT, edit(f"{UP}.weight_global_scale", lambda t: t * 2), "gate-up-scale", "experts.1.gate_proj"),
    (MO, edit(f"{UP}.weight_scale_2", lambda t: t * 2), "gate-up-scale", "experts.1.gate_proj"),
    (CT, drop(f"{UP}.weight_global_scale"), "missing", f"{UP}.weight_global_scale"),
    (MO, drop(f"{UP}.weight_scale_2"), "missing", f"{UP}.weight_scale_2"),
    (MO, drop(f"{UP}.input_scale"), "missing", f"{UP}.input_scale"),
    (CT, drop(f"{UP}.weight_scale"), "missing", f"{UP}.weight_scale"),
    (INK, drop(f"{STACK}_amax"), "missing", f"{STACK}_amax"),
    (INK, drop(f"{STACK}_outer_scale_denominator"), "missing", "denominator"),
    (CT, edit(f"{UP}.weight_scale", poke(0x7F)), "nan-scale", UP),
    (CT, edit(f"{UP}.weight_scale", poke(0xFF)), "nan-scale", UP),
    (CT, edit(f"{UP}.weight_scale", poke(0x81)), "nan-scale", UP),
    (INK, edit(f"{STACK}_scale", poke(0x7F)), "nan-scale", STACK),
    (MO, edit("model.layers.1.mlp.experts.0.up_proj.weight_scale", poke(255)), "nan-scale", "layers.1"),
    (CT, edit(f"{UP}.weight_global_scale", lambda t: t * float("inf")), "nan-scale", UP),
    (MO, edit(f"{UP}.weight_scale_2", lambda t: t * 0), "nan-scale", UP),
    (MO, edit(f"{UP}.input_scale", lambda t: t * float("nan")), "nan-scale", UP),
    (CT, edit(f"{UP}.weight_scale", lambda t: t.view(torch.uint8)), "dtype", f"{UP}.weight_scale"),
    (CT, edit(f"{UP}.weight_global_scale", lambda t: t.bfloat16()), "dtype", f"{UP}.weight_global_scale"),
    (CT, edit(f"{UP}.weight_scale", lambda t: t[:, :-1]), "shape", f"{UP}.weight_scale"),
    (CT, lambda _, c: c.pop("quantization_config"), "config", "config.json"),
    (MO, lambda _, c: c["quantization_config"]["ignore"].append("*experts.1.up*"), "ignore-list", UP),
    (MO, lambda _, c: c["quantization_config"]["ignore"].remove("lm_head"), "ignore-list", "lm_head"),
    (MO, lambda _, c: c["quantization_config"]["quantized_layers"].pop(UP), "ignore-list", UP),
    (MO, lambda _, c: c["quantization_config"]["quantized_layers"].update(x={}), "ignore-list", "x"),
    (CT, lambda _, c: c["quantization_config"]["config_groups"].pop("group_0"), "ignore-list", UP),
    (CT, lambda _, c: c["quantization_config"].update(ignore=["re:("]), "config", "config.json"),
]


@pytest.mark.parametrize(("format", "change", "fault", "name"), FAULTS)
def test_each_fault_is_named(broken: Callable, format: str, change: Callable, fault: str, name: str) -> None:
    report = broken(format, change)
    assert report.status == 1
    assert any(check == fault and name in where for check, where, _ in report.problems), report.text()


def test_a_dropped_expert_is_named(broken: Callable) -> None:
    def drop_expert(tensors: dict, _: dict) -> None:
        for name in [n for n in tensors if "layers.0.mlp.experts.2." in n]:
            del tensors[name]

    report = broken(CT, drop_expert)
    assert ("missing", "model.layers.0.mlp.experts", "experts [2] of 3 are not there") in report.problems


@pytest.mark.parametrize(
    ("format", "name"), [(CT, f"{UP}.weight_packed"), (MO, f"{UP}.weight"), (INK, STACK)]
)
def test_nibble_order_shows_against_the_source(broken: Callable, format: str, name: str) -> None:
    report = broken(format, edit(name, swap), compare=True)
    assert {check for check, _, _ in report.problems} == {"nibble-order"}


def test_nibble_order_is_said_to_be_unchecked_without_a_source(broken: Callable) -> None:
    report = broken(CT, nothing)
    assert report.status == 0
    assert "nibble order not checked" in report.text()


@pytest.mark.parametrize(("format", "name"), [(CT, f"{UP}.weight_packed"), (INK, STACK)])
def test_one_wrong_byte_shows_against_the_source(broken: Callable, format: str, name: str) -> None:
    report = broken(format, edit(name, lambda t: t.view(-1).__setitem__(7, t.view(-1)[7] ^ 1)), compare=True)
    assert [check for check, _, _ in report.problems] == ["weights"]
    assert "1 of" in report.text()


def test_tp_of_a_width_of_160(make: Callable, tmp_path: Path) -> None:
    """160 = 10 blocks of 16 (5 of 32): two ranks are fine for NVFP4 and cut an MXFP8 block, four cut both."""
    source = make(layers=2)
    export(ExportConfig(checkpoint=source, out=tmp_path / "out", format=CT, recipe="inkling", progress=False))
    two = {where for check_, where, _ in check(tmp_path / "out", tp=2).problems if check_ == "tp-split"}
    four = {where for check_, where, _ in check(tmp_path / "out", tp=4).problems if check_ == "tp-split"}
    assert two == {f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(3)}
    assert two < four
    assert "model.layers.0.mlp.experts.0.down_proj.weight_packed" in four


def test_index_faults_are_all_reported(make: Callable, tmp_path: Path) -> None:
    config = ExportConfig(
        checkpoint=make(layers=2), out=tmp_path / "out", recipe="inkling", max_shard_gb=1e-4, progress=False
    )
    export(config)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    victim = index["weight_map"]["lm_head.weight"]
    (tmp_path / "out" / victim).unlink()
    index["weight_map"]["model.layers.9.norm.weight"] = "model-00099-of-00099.safetensors"
    (tmp_path / "out" / INDEX_NAME).write_text(json.dumps(index))
    report = check(tmp_path / "out")
    assert sum(name == "index-file" for name, _, _ in report.problems) == 2
    assert any("lm_head.weight" in sentence for _, _, sentence in report.problems)


def test_a_truncated_file_is_reported(make: Callable, tmp_path: Path) -> None:
    export(ExportConfig(checkpoint=make(layers=2), out=tmp_path / "out", recipe="inkling", progress=False))
    path = tmp_path / "out" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert check(tmp_path / "out").problems[0][0] == "header"


def test_a_model_in_high_precision_and_senseless_options(make: Callable, tmp_path: Path) -> None:
    model = make()
    assert check(model).status == 1
    with pytest.raises(CheckpointError, match="tp is 0"):
        ValidateConfig(checkpoint=tmp_path, tp=0)
    with pytest.raises(CheckpointError, match="no such folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file; name the folder that holds it"):
        check(model / "config.json")
    with pytest.raises(CheckpointError, match="no tensors in it"):
        check(tmp_path)


@pytest.mark.parametrize("sizes", [{"width": 96}, {"layers": 1}])
def test_another_source_is_never_sound(make: Callable, tmp_path: Path, sizes: dict) -> None:
    """Other sizes, and matrices that the source lacks."""
    export(ExportConfig(checkpoint=make(layers=2), out=tmp_path / "out", recipe="mxfp8", progress=False))
    report = check(tmp_path / "out", against=make(name="other", **{"layers": 2} | sizes), tp=1)
    assert report.status != 0
    assert "has another size" in report.text() or "has no counterpart" in report.text()
