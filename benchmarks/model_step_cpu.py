"""Claims: a training step of our Inkling 2 is at least twice as fast as that of transformers' class, one of
our Nemotron-H at least three times; with recipe `inkling` it takes at most 1.6 times the step of `bf16`.

    python benchmarks/model_step_cpu.py [--preset tiny | hybrid-tiny] [--threads 2] [--rounds 9]
    [--recipe bf16 --recipe inkling] [--cpu-time]

Both models have the same configuration, weights and tokens. A step is forward, loss, backward, clip and a
fused AdamW update, in FP32, which is the dtype that CPUs are fast in. Steps take turns, so that both meet
the same machine; the first two of each compile and warm up and do not count. transformers' class computes
without its optional CUDA kernels, as it does on every CPU. Each --recipe adds ours converted, which rounds
its GEMMs' operands as the recipe says. On a machine that does other work, one thread and --cpu-time still
compare them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from nybble.layers import convert, set_step
from nybble.models import presets

WARM_UP = 2


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--preset", default="tiny", choices=presets.names())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recipe", action="append", default=[], help="also time ours with this recipe")
    parser.add_argument("--cpu-time", action="store_true", help="time of the process, not of the clock")
    arguments = parser.parse_args()
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it advises on kernels for GPUs
    torch.set_num_threads(arguments.threads)
    preset = presets.get(arguments.preset)
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {"nybble": preset.model()}
    published = getattr(transformers, type(models["nybble"]).__name__)
    models["transformers"] = published(preset.model_config())
    converted = {f"nybble {recipe}": recipe for recipe in arguments.recipe}
    models |= {name: preset.model() for name in converted}
    weights = models["nybble"].state_dict()
    for model in models.values():
        model.load_state_dict(weights)
    for name, recipe in converted.items():
        convert(models[name], recipe)
    ids = torch.randint(0, preset.vocabulary, (preset.batch, preset.sequence))
    steps = {name: _step(model, ids) for name, model in models.items()}
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(WARM_UP + arguments.rounds):
        losses = {}
        for name, step in steps.items():
            start = clock()
            losses[name] = step(turn)
            if turn >= WARM_UP:
                times[name].append(clock() - start)
    print(f"{preset.name}, {preset.batch} x {preset.sequence} tokens, {arguments.threads} threads; {losses}")
    reference = times["transformers"]
    for name, spent in times.items():
        print(
            f"{name:16} best {1e3 * min(spent):7.1f} ms  median {1e3 * statistics.median(spent):7.1f} ms  "
            f"transformers takes {_ratio(reference, spent):.2f} times as long (median of rounds), "
            f"{min(reference) / min(spent):.2f} times (best)"
        )
    for other in list(converted)[1:]:
        first = next(iter(converted))
        print(f"{other} takes {_ratio(times[other], times[first]):.2f} times as long as {first}")


def _ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _step(model: nn.Module, ids: torch.Tensor) -> Callable[[int], float]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(turn: int) -> float:
        set_step(model, turn)
        loss = model(ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return round(loss.item(), 4)

    return step


if __name__ == "__main__":
    main()
