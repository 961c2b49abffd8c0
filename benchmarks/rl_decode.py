"""Speed of sampling, and bytes of the expert weights that it reads, by recipe and by what is kept of weights.

    python benchmarks/rl_decode.py --preset small --rows 64 --tokens 16

Random weights; all rows run to the last token, so a step decodes `rows` tokens. `codes` keeps experts at 4.5
bits a value (NVFP4; 8.25 in the layers whose experts are MXFP8): a GPU multiplies few rows with the codes,
other products bring them back first. `values` keeps what the product reads. Prints the median of the rounds,
prompts included, and bytes of the kept expert operands of all layers against those of BF16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from nybble.layers import Experts, convert, set_step
from nybble.layers.operand import Codes
from nybble.models import Inkling2ForCausalLM, presets
from nybble.recipes import load_recipe
from nybble.rl.sampler import Request, SamplingParams, sample

CASES = (
    ("bf16", "values"),
    ("hopper", "codes"),
    ("inkling", "codes"),
    ("hopper", "values"),
    ("inkling", "values"),
)
"""`hopper` differs from `bf16` in the forward pass by its experts alone; `inkling` by MXFP8 elsewhere too."""


def kept_shares(model: torch.nn.Module) -> tuple[float, float]:
    """Bytes of the operands that expert modules hold between passes, against BF16's: the least of any layer,
    and of all layers together."""
    shares = []
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        size = 0
        for cache in module.weight_caches:
            for held in cache.kept.values():
                parts = held if isinstance(held, Codes) else (held.values, held.amax)
                size += sum(part.nbytes for part in parts)
        shares.append(size / (2 * sum(p.numel() for p in module.parameters())))
    return min(shares), statistics.fmean(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--invariant", action="store_true", help="in the batch-invariant mode")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model = Inkling2ForCausalLM(presets.get(chosen.preset).model_config()).to(chosen.device)
    prompt = tuple(range(1, chosen.prompt + 1))
    requests = [Request(prompt=prompt, problem=i, sample=0) for i in range(chosen.rows)]
    params = SamplingParams(max_new_tokens=chosen.tokens)
    print(f"{chosen.preset}, {chosen.rows} rows, {chosen.tokens} new tokens, {chosen.device}")
    for recipe, kept in CASES:
        convert(model, replace(load_recipe(recipe), cache=kept))
        seconds = []
        for number in range(chosen.rounds + 1):  # the first compiles and fills the caches
            set_step(model, 0, number)
            torch.cuda.synchronize() if chosen.device == "cuda" else None
            started = time.perf_counter()
            sample(model, requests, params, frozenset(), invariant=chosen.invariant)
            seconds.append(time.perf_counter() - started)
        speed = chosen.rows * chosen.tokens / statistics.median(seconds[1:])
        least, whole = kept_shares(model)
        print(
            f"{recipe:8} {kept:6} {speed:10.0f} tokens/s   expert operands {whole:.4f} of BF16's bytes, "
            f"{least:.4f} in the smallest layer",
            flush=True,
        )


if __name__ == "__main__":
    main()
