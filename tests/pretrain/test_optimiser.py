"""Which parameters decay, clipping, Muon's share, and a state that survives a checkpoint bit for bit."""

import pytest
import torch
from torch import nn

from nybble.errors import CheckpointError
from nybble.pretrain.config import OptimiserConfig
from nybble.pretrain.optimiser import Optimiser, is_matrix


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 4, groups=8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))
        self.lm_head = nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def take_step(model: nn.Module, optimiser: Optimiser, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimiser.set_factor(1.0)
    optimiser.clip_gradients()
    optimiser.step()
    optimiser.zero_grad()


def test_decay_reaches_matrices_alone() -> None:
    model = Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = Optimiser(model, OptimiserConfig(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.set_factor(1.0)
    optimiser.step()
    decayed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert decayed == {"embed.weight", "mix.weight", "experts", "lm_head.weight"}
    torch.testing.assert_close(model.experts.detach(), before["experts"] * 0.95)


def test_is_matrix_leaves_out_depthwise_convolutions_and_vectors() -> None:
    assert is_matrix(torch.empty(3, 4, 5))
    assert not is_matrix(torch.empty(8, 1, 4))
    assert not is_matrix(torch.empty(8))
    assert not is_matrix(torch.empty(1, 8))


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_clipping_scales_the_whole_gradient(clip: float) -> None:
    model = Small()
    optimiser = Optimiser(model, OptimiserConfig(clip=clip))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    count = sum(p.numel() for p in model.parameters())
    norm = optimiser.clip_gradients()
    assert float(norm) == pytest.approx(count**0.5)
    expected = 0.5 / count**0.5 if clip else 1.0
    torch.testing.assert_close(model.mix.weight.grad, torch.full((8, 8), expected), rtol=1e-4, atol=0.0)


def test_muon_takes_the_matrices_of_the_layers() -> None:
    model = Small()
    muon, adamw = Optimiser(model, OptimiserConfig(optimiser="muon")).parts
    assert isinstance(muon, torch.optim.Muon)
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [id(model.mix.weight)]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 6


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_state_restored_gives_the_same_next_step(kind: str) -> None:
    config = OptimiserConfig(optimiser=kind)  # type: ignore[arg-type]
    model = Small()
    optimiser = Optimiser(model, config)
    for seed in range(3):
        take_step(model, optimiser, seed)
    twin = Small()
    twin.load_state_dict(model.state_dict())
    restored = Optimiser(twin, config)
    target = restored.allocate({name: (t.shape, t.dtype) for name, t in optimiser.state().items()})
    for name, tensor in optimiser.state().items():
        target[name].copy_(tensor)
    take_step(model, optimiser, 9)
    take_step(twin, restored, 9)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_state_of_another_model_is_refused_by_name() -> None:
    optimiser = Optimiser(Small(), OptimiserConfig())
    with pytest.raises(CheckpointError, match="of other, which the model lacks"):
        optimiser.allocate({"other/exp_avg": (torch.Size([2]), torch.float32)})
    with pytest.raises(CheckpointError, match=r"no optimiser state of experts"):
        optimiser.allocate({"embed.weight/exp_avg": (torch.Size([11, 8]), torch.float32)})
