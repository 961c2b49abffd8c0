"""The order of sequences: nothing lost or repeated, the same for all ranks and workers, exact to resume."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from nybble.data import IGNORE, Dataset, Loader, Permutation, PrepareConfig, prepare
from nybble.errors import DataError

S = 32


def rows(loader: Loader, count: int) -> torch.Tensor:
    """Inputs and last label of `count` batches, [count * B, S + 1]."""
    batches = list(itertools.islice(loader, count))
    inputs = torch.cat([batch["input_ids"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    return torch.cat([inputs, labels[:, -1:]], dim=1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4097, 100_003])
def test_permutation_is_a_bijection_that_differs_by_seed_and_epoch(size: int) -> None:
    base = Permutation(size, seed=1)(np.arange(size))
    assert np.array_equal(np.sort(base), np.arange(size))
    if size >= 1000:
        for other in (Permutation(size, seed=2), Permutation(size, seed=1, epoch=1)):
            # Two random permutations agree in one place on average.
            assert (other(np.arange(size)) == base).sum() < 12
        assert abs(np.corrcoef(base, np.arange(size))[0, 1]) < 5 / size**0.5


def test_permutation_never_changes_between_releases() -> None:
    # A change here breaks the resumption of every running experiment.
    assert Permutation(1000, seed=7, epoch=2)(np.arange(6)).tolist() == [529, 590, 893, 911, 345, 910]


def test_an_epoch_visits_every_window_once(dataset: Dataset) -> None:
    loader = Loader(dataset, "train", 1, S, seed=3)
    tokens = dataset.shards("train").read(0, len(dataset.shards("train")))
    expected = np.stack([tokens[i * S : i * S + S + 1] for i in range(loader.windows)])
    assert loader.windows == (len(tokens) - 1) // S
    for _ in range(2):
        seen = rows(loader, loader.windows).numpy()
        assert not np.array_equal(seen, expected)
        assert np.array_equal(seen[np.lexsort(seen.T)], expected[np.lexsort(expected.T)])


def test_order_is_a_function_of_the_seed(dataset: Dataset) -> None:
    first, again, other = (rows(Loader(dataset, "train", 4, S, seed=seed), 20) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_see_the_batches_of_one(dataset: Dataset, world: int) -> None:
    alone = Loader(dataset, "train", 4, S, seed=5)
    count = alone.windows // 4 + 5  # into the second epoch, with a batch that straddles
    ranks = [Loader(dataset, "train", 4, S, seed=5, rank=rank, world=world) for rank in range(world)]
    for _ in range(count):
        parts = [next(loader) for loader in ranks]
        whole = next(alone)
        for name in whole:
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


@pytest.mark.parametrize("workers", [1, 3])
def test_reading_ahead_changes_nothing(dataset: Dataset, workers: int) -> None:
    plain = Loader(dataset, "train", 8, S, seed=5)
    ahead = Loader(dataset, "train", 8, S, seed=5, num_workers=workers)
    count = plain.windows // 8 + 5
    assert torch.equal(rows(plain, count), rows(ahead, count))
    assert plain.state_dict() == ahead.state_dict()
    ahead.load_state_dict({**plain.state_dict(), "sequences": 16})
    plain.load_state_dict({**plain.state_dict(), "sequences": 16})
    assert torch.equal(rows(plain, 3), rows(ahead, 3))
    ahead.close()
    assert torch.equal(rows(plain, 3), rows(ahead, 3))
    ahead.close()


@pytest.mark.parametrize("consumed", [0, 1, 17, 400])
def test_resume_goes_on_exactly_with_other_ranks_batches_and_workers(dataset: Dataset, consumed: int) -> None:
    whole = Loader(dataset, "train", 4, S, seed=9)
    assert whole.windows < 1000 < 4 * 400  # the last case lies in a later epoch
    rows(whole, consumed) if consumed else None
    state = whole.state_dict()
    expected = rows(whole, 6)
    resumed = Loader(dataset, "train", 4, S, seed=9, num_workers=1)
    resumed.load_state_dict(state)
    assert torch.equal(rows(resumed, 6), expected)
    resumed.close()
    wider = [Loader(dataset, "train", 8, S, seed=9, rank=rank, world=2) for rank in range(2)]
    for loader in wider:
        loader.load_state_dict(state)
    both = [torch.cat([rows(loader, 1) for loader in wider]) for _ in range(3)]
    assert torch.equal(torch.cat(both), expected)


def test_a_state_of_another_run_is_refused(dataset: Dataset, text_folder: Path, tmp_path: Path) -> None:
    state = Loader(dataset, "train", 4, S, seed=9).state_dict()
    out = prepare(PrepareConfig(source=(str(text_folder),), out=tmp_path / "o", vocab_size=300, quiet=True))
    for loader, name in (
        (Loader(out, "train", 4, S, seed=9), "dataset"),
        (Loader(dataset, "val", 4, S, seed=9), "split"),
        (Loader(dataset, "train", 4, S + 1, seed=9), "seq_len"),
        (Loader(dataset, "train", 4, S, seed=8), "seed"),
    ):
        with pytest.raises(DataError, match=f"cannot resume: the checkpoint's data has {name} "):
            loader.load_state_dict(state)
    loader = Loader(dataset, "train", 4, S, seed=9)
    with pytest.raises(DataError, match="lacks 'dataset'"):
        loader.load_state_dict({})
    for bad in (-1, "3", None):
        with pytest.raises(DataError, match="sequences"):
            loader.load_state_dict({**state, "sequences": bad})


@pytest.mark.parametrize(("world", "batch_size", "seq_len"), [(1, 1, 7), (1, 3, S), (2, 4, S), (2, 64, 512)])
def test_eval_scores_every_token_once_in_order(
    dataset: Dataset, world: int, batch_size: int, seq_len: int
) -> None:
    tokens = dataset.shards("val").read(0, len(dataset.shards("val")))
    ranks = [
        list(Loader(dataset, "val", batch_size, seq_len, seed=4, rank=rank, world=world).eval_batches())
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    labels = torch.cat([batch["labels"] for step in zip(*ranks, strict=True) for batch in step])
    inputs = torch.cat([batch["input_ids"] for step in zip(*ranks, strict=True) for batch in step])
    scored = labels != IGNORE
    assert inputs.shape[1] == seq_len
    assert np.array_equal(labels[scored].numpy(), tokens[1:])
    assert np.array_equal(inputs[scored].numpy(), tokens[:-1])
    assert bool((inputs[~scored] == dataset.eot_id).all())


def test_eval_leaves_the_position_and_can_be_cut_short(dataset: Dataset) -> None:
    loader = Loader(dataset, "val", 2, S)
    batches = list(loader.eval_batches(max_batches=2))
    assert len(batches) == 2
    assert loader.sequences == 0
    assert torch.equal(batches[0]["input_ids"], next(loader.eval_batches())["input_ids"])


def test_documents_end_with_their_end_token(dataset: Dataset) -> None:
    batch = next(Loader(dataset, "train", 16, 256, doc_ids=True))
    for ids, docs, positions in zip(batch["input_ids"], batch["doc_ids"], batch["positions"], strict=True):
        doc = position = 0
        for token, its_doc, its_position in zip(ids.tolist(), docs.tolist(), positions.tolist(), strict=True):
            assert (its_doc, its_position) == (doc, position)
            position += 1
            if token == dataset.eot_id:
                doc, position = doc + 1, 0
    assert batch["doc_ids"].max() > 0


def test_tokens_are_the_texts(dataset: Dataset, text_folder: Path) -> None:
    tokens = np.concatenate(
        [dataset.shards(name).read(0, dataset.splits[name].tokens) for name in dataset.splits]
    )
    decoded = dataset.tokenizer.decode(tokens.tolist()).split("<|endoftext|>")
    assert decoded.pop() == ""
    assert sorted(decoded) == sorted(file.read_text() for file in text_folder.iterdir())


def test_bad_arguments_are_named(dataset: Dataset) -> None:
    tokens = dataset.splits["train"].tokens
    with pytest.raises(DataError, match=f"has {tokens} tokens, a sequence of {tokens} needs {tokens + 1}"):
        Loader(dataset, "train", 1, tokens)
    assert Loader(dataset, "train", 1, tokens - 1).windows == 1
    short = Loader(dataset, "val", 1, tokens)
    assert len(list(short.eval_batches())) == 1
    with pytest.raises(DataError, match="shorten seq_len"):
        next(short)
    for arguments in ({"batch_size": 3, "world": 2}, {"batch_size": 0}):
        with pytest.raises(DataError, match="batch_size"):
            Loader(dataset, "train", seq_len=S, **arguments)
    with pytest.raises(DataError, match="rank 2 of 2"):
        Loader(dataset, "train", 2, S, rank=2, world=2)
    with pytest.raises(DataError, match="seq_len"):
        Loader(dataset, "train", 2, 0)
    with pytest.raises(DataError, match="num_workers"):
        Loader(dataset, "train", 2, S, num_workers=-1)
