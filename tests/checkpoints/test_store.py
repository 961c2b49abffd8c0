"""A checkpoint is whole or absent: kills, full disks and damaged files never cost the one before."""

import errno
import json
from pathlib import Path

import pytest
import torch

from nybble import checkpoints
from nybble.checkpoints import store, tensors
from nybble.checkpoints.identity import check_identity
from nybble.errors import CheckpointError
from nybble.recipes import load_recipe

TENSORS = {
    "model/w": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
    "model/transposed": torch.arange(24.0).reshape(4, 6).t(),
    "optimiser/w/step": torch.tensor(3.0),
    "rng/cpu": torch.arange(9, dtype=torch.uint8),
    "model/half": torch.randn(3).bfloat16(),
    "model/empty": torch.empty(0, 4),
}


def save(root: Path, step: int) -> Path:
    return checkpoints.write(root, step, TENSORS, {"data": {"sequences": step}}, {"recipe": "inkling"})


def test_round_trip_is_exact_whatever_the_dtype_shape_and_strides(tmp_path: Path) -> None:
    saved = checkpoints.read(save(tmp_path, 7))
    assert (saved.step, saved.identity, saved.state) == (7, {"recipe": "inkling"}, {"data": {"sequences": 7}})
    loaded = {name: torch.full_like(t, 9) for name, t in TENSORS.items()}
    tensors.load_tensors(saved.tensors, loaded)
    for name, expected in TENSORS.items():
        assert torch.equal(loaded[name], expected), name


def test_large_states_are_split_into_files_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "FILE_BYTES", 100)
    saved = checkpoints.read(save(tmp_path, 1))
    assert len(list(saved.tensors.glob("*.safetensors"))) > 1
    loaded = {name: torch.zeros_like(t) for name, t in TENSORS.items()}
    tensors.load_tensors(saved.tensors, loaded)
    assert torch.equal(loaded["model/w"], TENSORS["model/w"])


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    files = [p for p in save(tmp_path, 1).rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".safetensors"}


def test_latest_passes_over_unfinished_ones_and_the_next_save_clears_them(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "absent") is None
    first = save(tmp_path, 100)
    (tmp_path / "step_00000200").mkdir()  # no manifest: not whole
    (tmp_path / ".unfinished-step_00000300").mkdir()
    assert checkpoints.latest(tmp_path) == first
    save(tmp_path, 400)
    assert not list(tmp_path.glob(".unfinished*"))


def test_keep_last_k(tmp_path: Path) -> None:
    for step in (9, 10, 11, 100):
        save(tmp_path, step)
    checkpoints.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000011", "step_00000100"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = checkpoints.write(tmp_path, 5, {"a": torch.ones(2)}, {"new": True}, {})
    assert checkpoints.read(path).state == {"new": True}
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_checkpoint_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    old = save(tmp_path, 1)

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, "No space left on device")

    # Inside torch's own writer, so that its wrapping of the error is part of the test.
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_files_from_queue", full)
    with pytest.raises(CheckpointError, match=r"the disk is full, so step 2 could not be saved .* is intact"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == [old.name]
    checkpoints.read(old)


def test_a_full_disk_met_by_safetensors_or_at_the_end_is_told_too(tmp_path: Path) -> None:
    def extras(_folder: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match=r"the disk is full.*there is no older checkpoint"):
        checkpoints.write(tmp_path, 1, TENSORS, {}, {}, extras)
    assert list(tmp_path.iterdir()) == []


def test_any_other_failure_cleans_up_and_is_not_disguised(tmp_path: Path) -> None:
    def extras(_folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(tmp_path, 1, TENSORS, {}, {}, extras)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path, 1)
    victim = next(path.glob("tensors/*.safetensors"))
    content = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    elif damage == "truncated":
        victim.write_bytes(content[:-10])
    else:
        content[-1] ^= 1
        victim.write_bytes(content)
    with pytest.raises(CheckpointError, match=victim.name):
        checkpoints.read(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "step": 1, "identity": {}, "files": {}}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoints.read(path)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        checkpoints.read(tmp_path)


def test_loading_into_another_model_names_the_tensor(tmp_path: Path) -> None:
    folder = checkpoints.read(save(tmp_path, 1)).tensors
    with pytest.raises(CheckpointError, match="holds no tensor model/other"):
        tensors.load_tensors(folder, {"model/other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"model/w is torch\.float32 \[5, 7\] in the checkpoint"):
        tensors.load_tensors(folder, {"model/w": torch.zeros(5, 8)})


def test_identity_names_what_differs() -> None:
    saved = {"recipe": "a", "model": {"layers": 2, "heads": 4}}
    check_identity(saved, json.loads(json.dumps(saved)), Path("x"))
    message = (
        r"belongs to another run: model\.layers is 2 there and 3 here; go on with what it was begun with"
    )
    with pytest.raises(CheckpointError, match=message):
        check_identity(saved, {"recipe": "a", "model": {"layers": 3, "heads": 4}}, Path("x"))


def test_a_run_of_another_recipe_says_where_its_own_is_kept(tmp_path: Path) -> None:
    began = load_recipe({"name": "began", "rule": [{"modules": "**", "all": "mxfp8", "after": 3}]})
    kept, checkpoint = tmp_path / "recipe.toml", tmp_path / "checkpoints" / "step_00000002"
    kept.write_text(began.to_toml())
    with pytest.raises(CheckpointError) as caught:
        check_identity({"recipe": began.hash()}, {"recipe": "edited"}, checkpoint)
    assert f'recipe is "{began.hash()}" there and "edited" here' in str(caught.value)
    assert f"(its recipe, began, with --recipe {kept})" in str(caught.value)
    assert load_recipe(kept).hash() == began.hash()


def test_disk_full_is_recognised_in_every_guise() -> None:
    assert store.is_disk_full(OSError(errno.ENOSPC, "x"))
    assert store.is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not store.is_disk_full(OSError(errno.EACCES, "x"))
    assert not store.is_disk_full(RuntimeError("os error 2"))
