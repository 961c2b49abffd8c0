"""Claim: exporting a 1 GB BF16 mixture of experts on two cores runs at half the speed of copying the file or
more, with at most 1.5 GB of memory above the import of torch.

    python benchmarks/export_cpu.py [--gb 1.0] [--rounds 7] [--folder DIR]

Copies (shutil.copyfile, to the page cache as the export) and exports take turns, so that both meet the same
machine; the best of each counts, as other processes only ever add time.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch

BASE = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

from nybble.checkpoints.export import ExportConfig, export  # noqa: E402  after the memory of torch was read
from nybble.checkpoints.writer import Spec, Writer, write_json  # noqa: E402

HIDDEN, WIDTH, EXPERTS = 1024, 512, 64


def make_model(folder: Path, gb: float) -> int:
    """A folder of random BF16 weights under Qwen3-MoE's names. Returns its bytes."""
    layers = max(2, round(gb * 1e9 / (EXPERTS * 3 * HIDDEN * WIDTH * 2)))
    specs = [
        Spec("model.embed_tokens.weight", "BF16", (4096, HIDDEN)),
        Spec("lm_head.weight", "BF16", (4096, HIDDEN)),
    ]
    for layer in range(layers):
        module = f"model.layers.{layer}"
        specs += [Spec(f"{module}.self_attn.{p}_proj.weight", "BF16", (HIDDEN, HIDDEN)) for p in "qkvo"]
        specs.append(Spec(f"{module}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)))
        for expert in range(EXPERTS):
            bank = f"{module}.mlp.experts.{expert}"
            specs += [Spec(f"{bank}.{part}_proj.weight", "BF16", (WIDTH, HIDDEN)) for part in ("gate", "up")]
            specs.append(Spec(f"{bank}.down_proj.weight", "BF16", (HIDDEN, WIDTH)))
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(HIDDEN * HIDDEN * 5, generator=generator) * 0.02).bfloat16()
    with Writer(folder, specs) as writer:
        for i, spec in enumerate(specs):
            count = spec.nbytes // 2
            start = (i * 7919) % (noise.numel() - count + 1)
            writer.put(spec.name, noise[start : start + count].view(spec.shape))
        writer.close()
    write_json(
        folder / "config.json",
        {"model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": EXPERTS},
    )
    return sum(spec.nbytes for spec in specs)


def main() -> None:
    """Time both sides in turns and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        (root / "model").mkdir()
        nbytes = make_model(root / "model", options.gb)
        config = ExportConfig(checkpoint=root / "model", out=root / "out", recipe="inkling", progress=False)
        export(config)  # compiles the kernels
        shutil.rmtree(root / "out")
        copies, exports = [], []
        for _ in range(options.rounds):
            start = time.perf_counter()
            (root / "copy").mkdir()
            shutil.copyfile(root / "model" / "model.safetensors", root / "copy" / "model.safetensors")
            middle = time.perf_counter()
            export(config)
            end = time.perf_counter()
            shutil.rmtree(root / "copy")  # removing is timed on neither side
            shutil.rmtree(root / "out")
            copies.append(middle - start)
            exports.append(end - middle)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - BASE
    copy_s, export_s = min(copies), min(exports)
    print(
        f"{nbytes / 1e9:.2f} GB BF16, {torch.get_num_threads()} threads: "
        f"copy {nbytes / 1e9 / copy_s:.2f} GB/s, "
        f"export {nbytes / 1e9 / export_s:.2f} GB/s, ratio {copy_s / export_s:.2f} (at least 0.5); "
        f"peak memory above import of torch {peak / 1e9:.2f} GB (at most 1.5)"
    )


if __name__ == "__main__":
    main()
