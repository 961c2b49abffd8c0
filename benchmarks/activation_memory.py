"""What an expert layer keeps for its backward pass: the claim is at most 0.30 of what BF16 keeps.

    python benchmarks/activation_memory.py --tokens 4096 --hidden 1024 --width 512 --experts 16 --top-k 4

Counts the storages that autograd saves in one forward pass, each once, parameters and the cached operands of
weights left out: those do not grow with the batch. Inputs are BF16 for all, so that BF16 keeps 2 bytes a
value. Rows:
    plain   torch autograd through grouped products, as transformers' grouped_mm experts compute it
    bf16    the recipe `bf16`: input, gate and up products, input of the down product
    mxfp8   the recipe `mxfp8`
    inkling the recipe `inkling`: NVFP4 codes; gate and up are computed again from them
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nybble.layers import Experts, convert, set_step
from nybble.recipes import load_recipe

LIMIT = 0.30


class PlainExperts(nn.Module):
    """Gated experts in plain torch: tokens sorted by expert, one product an expert."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        k = index.shape[1]
        ordered, order = torch.sort(index.reshape(-1), stable=True)
        sizes = torch.bincount(ordered, minlength=self.down_proj.shape[0]).tolist()
        rows = x[order // k]
        gate_up = self._grouped(rows, self.gate_up_proj, sizes)
        gate, up = gate_up.chunk(2, dim=-1)
        out = self._grouped(self.act_fn(gate) * up, self.down_proj, sizes)
        out = out * weights.reshape(-1)[order, None].to(out.dtype)
        return out[torch.argsort(order)].view(*index.shape, -1).sum(1)

    @staticmethod
    def _grouped(rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        parts = zip(rows.split(sizes), weight.to(rows.dtype), strict=True)
        return torch.cat([F.linear(part, w) for part, w in parts])


def kept_bytes(forward: Callable[[], Tensor], skip: set[int]) -> int:
    """Bytes that `forward` saves for the backward pass, each storage once; `skip` holds pointers left out."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in skip:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(storages.values())


def measure(tokens: int, hidden: int, width: int, experts: int, top_k: int) -> dict[str, int]:
    """Kept bytes of one expert layer by recipe; "plain" is torch's own autograd."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    index = torch.rand(tokens, experts).topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, requires_grad=True)
    out = {}
    for name in ("plain", "bf16", "mxfp8", "inkling"):
        layer = PlainExperts(experts, hidden, width)
        if name == "plain":
            layer = layer.to(torch.bfloat16)  # its weights need no cast, which autograd would keep
        else:
            # The first of six layers: the last sixth has MXFP8 experts.
            model = nn.ModuleDict(
                {"layers": nn.ModuleList([layer, *(PlainExperts(1, 32, 32) for _ in range(5))])}
            )
            convert(model, load_recipe(name))
            set_step(model, 0)
        skip = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        layer(x, index, weights)
        if isinstance(layer, Experts):
            caches = [operand for cache in layer.weight_caches for operand in cache.kept.values()]
            skip |= {
                t.untyped_storage().data_ptr() for operand in caches for t in operand if isinstance(t, Tensor)
            }
        out[name] = kept_bytes(lambda layer=layer: layer(x, index, weights), skip)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tokens", 4096), ("hidden", 1024), ("width", 512), ("experts", 16), ("top-k", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    kept = measure(sizes.tokens, sizes.hidden, sizes.width, sizes.experts, sizes.top_k)
    print(f"{'recipe':10} {'MiB':>9} {'bytes a token':>14} {'of bf16':>8}")
    for name, size in kept.items():
        print(f"{name:10} {size / 2**20:9.2f} {size / sizes.tokens:14.0f} {size / kept['bf16']:8.3f}")
    share = kept["inkling"] / kept["bf16"]
    if share > LIMIT:
        raise SystemExit(f"inkling keeps {share:.3f} of what bf16 keeps, more than {LIMIT}")


if __name__ == "__main__":
    main()
