"""Small folders of weights in every layout of experts, written without a model class."""

from pathlib import Path

import torch

from nybble.checkpoints.header import NAMES
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.writer import Spec, Writer, write_json

H, WIDTH, E, LAYERS = 96, 160, 3, 6


def weights(
    hidden: int = H,
    width: int = WIDTH,
    experts: int = E,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Seeded weights by transformers' fused names; magnitudes differ from expert to expert and from gate to
    up.
    """
    g = torch.Generator().manual_seed(hidden * width + experts)
    out = {"model.embed_tokens.weight": torch.randn(50, hidden, generator=g)}
    for layer in range(layers):
        p = f"model.layers.{layer}"
        out[f"{p}.self_attn.q_proj.weight"] = torch.randn(hidden, hidden, generator=g) * 0.02
        out[f"{p}.self_attn.k_proj.weight"] = torch.randn(hidden // 3, hidden, generator=g) * 0.08
        out[f"{p}.mlp.gate.weight"] = torch.randn(experts, hidden, generator=g)
        out[f"{p}.mlp.gate.bias"] = torch.randn(experts, generator=g)
        spread = torch.logspace(-3, 0, experts)[:, None, None]
        first = torch.randn(experts, 2 * width, hidden, generator=g) * spread
        first[:, width:] *= 8.0
        first[0, 0, :16] = 0.0
        first[0, 1, :16] = 1e-7
        out[f"{p}.mlp.experts.gate_up_proj"] = first
        out[f"{p}.mlp.experts.down_proj"] = torch.randn(experts, hidden, width, generator=g) * spread
    out["lm_head.weight"] = torch.randn(50, hidden, generator=g)
    return {name: tensor.to(dtype) for name, tensor in out.items()}


def relayout(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """Fused experts as "fused", "interleaved" or "separate"."""
    out = {}
    for name, tensor in tensors.items():
        bank, _, leaf = name.rpartition(".")
        if layout == "fused" or leaf not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
        elif layout == "interleaved" and leaf == "down_proj":
            out[f"{bank}.w2_weight"] = tensor
        elif layout == "interleaved":
            gate, up = tensor.chunk(2, dim=1)
            mixed = torch.empty_like(tensor)
            mixed[:, 0::2], mixed[:, 1::2] = gate, up
            out[f"{bank}.w13_weight"] = mixed
        else:
            for e in range(tensor.shape[0]):
                if leaf == "down_proj":
                    out[f"{bank}.{e}.down_proj.weight"] = tensor[e]
                else:
                    gate, up = tensor[e].chunk(2)
                    out[f"{bank}.{e}.gate_proj.weight"], out[f"{bank}.{e}.up_proj.weight"] = gate, up
    return out


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict, shard_bytes: int = 1 << 40) -> Path:
    """Write tensors and config as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with Writer(
        folder, [Spec(n, NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()], shard_bytes
    ) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
        writer.close()
    write_json(folder / "config.json", config)
    return folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    opened = Folder.open(folder)
    return {name: opened.read(name) for name in opened}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
