"""The reader rejects what a stranger may have put into a file, before it allocates, and only ever with its
own error.
"""

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nybble.checkpoints.dialects import detect
from nybble.checkpoints.header import read_header, read_json
from nybble.checkpoints.load import ImportConfig, import_
from nybble.checkpoints.safetensors_io import INDEX_NAME, Folder
from nybble.checkpoints.validate import ValidateConfig, validate
from nybble.checkpoints.writer import Spec, Writer
from nybble.errors import CheckpointError

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file from any header: an object or ready bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def one(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_reads_what_the_library_writes_and_the_reverse(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.randint(0, 255, (2, 3, 7), dtype=torch.uint8),
        "d": torch.randn(6).to(torch.float8_e4m3fn),
        "e": torch.tensor(2.5),
        "f": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    folder = Folder.open(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(folder.read(name).float(), tensor.float()), name
    assert torch.equal(folder.read("a", slice(1, 3)), tensors["a"][1:3])
    specs = [Spec(e.name, e.dtype, e.shape) for e in folder.tensors.values()]
    (tmp_path / "out").mkdir()
    with Writer(tmp_path / "out", specs) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
        writer.close()
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name].float(), tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (one(), b"", "claims"),
        (one(), b"x" * 9, "foreign tail"),
        (one(shape=[-2]), b"x" * 8, "shape"),
        (one(shape=[2**63]), b"x" * 8, "shape"),
        (one(shape=[2**62, 2**62]), b"x" * 8, "needs"),
        (one(shape=[2.0]), b"x" * 8, "shape"),
        (one(shape=[True, 2]), b"x" * 8, "shape"),
        (one(shape="2"), b"x" * 8, "shape"),
        (one(shape=[1] * 17 + [2]), b"x" * 8, "shape"),
        (one(offsets=[8, 0]), b"x" * 8, "offsets span"),
        (one(offsets=[-8, 0]), b"x" * 8, "offsets"),
        (one(offsets=[2**63, 2**63 + 8]), b"x" * 8, "offsets"),
        (one(offsets=[4, 12]), b"x" * 12, "gap"),
        (one(dtype="F31"), b"x" * 8, "type"),
        (one(dtype=7), b"x" * 8, "type"),
        ({**one(), "b": one()["a"]}, b"x" * 8, "overlaps"),
        ({"a": {**one()["a"], "more": 1}}, b"x" * 8, "no more"),
        ({"a": 3}, b"", "dtype, shape"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ([], b"", "not an object"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        (b"{", b"", "JSON"),
        (b"\xff\xfe\x00", b"", "JSON"),
        (b"[" * 200_000, b"", "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "JSON"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, header: object, data: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(raw(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 101, 10**9])
def test_headers_longer_than_the_file_are_refused_without_reading_them(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(raw(tmp_path / "a.safetensors", one(), b"x" * 8, length=length))


def test_a_header_beyond_the_limit_is_refused_by_its_length_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # sparse
    with pytest.raises(CheckpointError, match="more than the limit"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 4, 8])
def test_files_too_short_for_a_header_are_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\x01" * size)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "../up.safetensors",
        "/etc/passwd.safetensors",
        "sub/a.safetensors",
        "..",
        "a.bin",
        7,
        "a\0.safetensors",
    ],
)
def test_an_index_cannot_reach_for_other_files(tmp_path: Path, name: object) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="points to"):
        Folder.open(tmp_path)


def test_index_and_files_that_disagree_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "y.safetensors")
    index = {
        "weight_map": {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors", "d": "z.safetensors"}
    }
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    found = {check for check, _ in Folder.scan(tmp_path).problems}
    assert found == {"index-entry", "index-file", "duplicate"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX_NAME])
def test_a_link_to_nothing_is_told_as_one(tmp_path: Path, name: str) -> None:
    """As in a cache of downloads whose blobs were cleaned away."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("../blobs/cleaned")
    with pytest.raises(CheckpointError) as caught:
        Folder.open(tmp_path)
    why = "is a link to ../blobs/cleaned, which is not there; fetch or copy what it points to"
    assert str(caught.value) == f"{tmp_path / name}: {why}"


def test_a_folder_with_the_name_of_a_file_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert Folder.scan(tmp_path).problems == [("file", f"{tmp_path}/model.safetensors: is no file")]


def test_a_file_truncated_after_it_was_opened_gives_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    folder = Folder.open(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(500)
    with pytest.raises(CheckpointError, match="ends early"):
        folder.read("a")


def test_json_values_that_are_no_objects_do_not_crash_the_readers(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    for value in (
        [],
        3,
        "x",
        {"config_groups": []},
        {"config_groups": {"g": 1}},
        {"quant_method": ["modelopt"]},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": value}))
        detect(Folder.open(tmp_path))
        validate(ValidateConfig(checkpoint=tmp_path, progress=False))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="object"):
        read_json(tmp_path / "config.json")


@FUZZ
@given(data=st.binary(max_size=300))
def test_fuzz_random_bytes(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        read_header(tmp_path / "a.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F8_E4M3", "X"]) | JSON,
        "shape": st.lists(st.integers(-2, 2**64), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-2, 64), min_size=2, max_size=2) | JSON,
    }
)


@FUZZ
@given(header=st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), ENTRY | JSON, max_size=4) | JSON)
def test_fuzz_headers(tmp_path: Path, header: object) -> None:
    try:
        entries = read_header(raw(tmp_path / "a.safetensors", header, b"\0" * 64))
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in entries.values()) == 64


LEAVES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_scale_inv",
)
STACKS = (
    "w13_weight",
    "w2_weight",
    "w13_weight_scale",
    "w13_weight_amax",
    "w2_weight_outer_scale_denominator",
)
NAME = st.builds(
    lambda bank, leaf: f"model.layers.0.{bank}.{leaf}",
    st.sampled_from(
        ["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.1.down_proj", "self_attn.q_proj"]
    ),
    st.sampled_from(LEAVES),
) | st.builds(
    lambda leaf: f"model.layers.0.mlp.experts.{leaf}",
    st.sampled_from([*STACKS, "gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj", "down_proj"]),
)
DTYPE = st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.int64])
SHAPE = st.lists(st.sampled_from([0, 1, 2, 8, 16, 32]), max_size=4).filter(
    lambda s: torch.Size(s).numel() <= 4096
)


@FUZZ
@given(
    tensors=st.dictionaries(NAME, st.tuples(DTYPE, SHAPE), min_size=1, max_size=6),
    config=st.fixed_dictionaries(
        {},
        optional={
            "model_type": st.sampled_from(["inkling2_text", "qwen3_moe"]) | JSON,
            "num_experts": st.integers(-1, 4) | JSON,
            "text_config": JSON,
            "quantization_config": st.fixed_dictionaries(
                {},
                optional={
                    "quant_method": st.sampled_from(["compressed-tensors", "modelopt"]) | JSON,
                    "config_groups": JSON,
                    "ignore": st.lists(st.sampled_from(["re:(", "re:.*", "lm_head"]) | JSON, max_size=3)
                    | JSON,
                    "weight_block_size": st.lists(st.integers(-1, 4), max_size=3) | JSON,
                    "quantized_layers": JSON,
                },
            )
            | JSON,
        },
    ),
)
def test_fuzz_folders_through_every_reader(tmp_path: Path, tensors: dict, config: dict) -> None:
    folder = tmp_path / "in"
    folder.mkdir(exist_ok=True)
    save_file({n: torch.zeros(s).to(d) for n, (d, s) in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(CheckpointError):
        assert validate(ValidateConfig(checkpoint=folder, progress=False, tp=2)).text()
    out = tmp_path / "out"
    try:
        import_(ImportConfig(checkpoint=folder, out=out, overwrite=True, progress=False))
    except CheckpointError:
        assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "out"}
