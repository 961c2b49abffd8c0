"""The loop: one optimiser step, and once in a while a validation, a line, a checkpoint.

Everything random in a step is a pure function of (seed, step, micro-step) or is part of the checkpoint, so
a run that was killed and resumed writes the same losses as one that never stopped.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nybble import together
from nybble.errors import NonFiniteError
from nybble.pretrain import metrics
from nybble.pretrain.balance import max_violation
from nybble.pretrain.guard import locate
from nybble.pretrain.schedule import lr_factor
from nybble.pretrain.session import Session
from nybble.pretrain.sinks import scalars
from nybble.pretrain.stop import StopRequest

Batch = dict[str, Tensor]
IGNORE = -100
"""Label that is no target, as in torch's cross entropy."""


def train_step(session: Session, step: int) -> dict[str, Any]:
    """One optimiser step on `accumulate` batches. Returns its row of metrics.

    One check of loss and gradient norm, and so one wait for the device, a step. Raises NonFiniteError, with
    the layer named and the weights, moments and biases as they were before the step, if either is not
    finite.
    """
    config, optimiser, balance = session.config, session.optimiser, session.balance
    batches = [session.next_batch() for _ in range(config.batch.accumulate)]

    session.model.train()
    balance.begin_step()
    passes = session.captured or partial(forward_backward, session)
    loss = passes(batches, step)
    session.add_gradients()
    norm = optimiser.clip_gradients()

    loss_value, norm_value = torch.stack([loss, norm.float()]).tolist()
    (loss_value,) = together.total([loss_value], session.device)
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        optimiser.zero_grad()
        place = locate(session.model, lambda: forward_backward(session, batches, step), step + 1)
        raise NonFiniteError(
            f"step {step + 1}: the loss is {loss_value:.4g} and the gradient norm {norm_value:.4g}: {place}; "
            f"the step was not applied, and {session.last_checkpoint()}"
        )

    optimiser.set_factor(lr_factor(step, config.schedule))
    optimiser.step()
    optimiser.zero_grad()
    counts = balance.end_step()
    row = {
        "step": step + 1,
        "loss": loss_value,
        "lr": optimiser.lr,
        "grad_norm": norm_value,
        "tokens": (step + 1) * config.batch.tokens_per_step,
    }
    if counts:
        row |= {"load_violation": max_violation(counts), "tokens_per_expert": counts}
    return row | session.exchanged()


def forward_backward(session: Session, batches: list[Batch], step: int) -> Tensor:
    """Mean loss over the batches (nats a token, FP32, []), with its gradient added to the parameters'; of
    several ranks, this one's share of the mean over all."""
    total = torch.zeros((), device=session.device)
    for micro, batch in enumerate(batches):
        session.set_step(step, micro)
        # Packed text has as many targets on each rank, so the mean of means is the mean; where it has not,
        # the data say how much more or less a rank counts.
        share = batch.get("share", 1.0)
        loss = session.loss(batch) * share / (len(batches) * together.world())
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def validate(session: Session, step: int) -> dict[str, float]:
    """Mean loss over the first `val_batches` batches of held-out text, nats a token.

    `val_loss` is that of all domains of the data together; of several, `val_loss/NAME` is each one's.
    """
    session.model.eval()
    totals: dict[str, Tensor] = {}
    targets: dict[str, int] = {}
    for micro, (domain, batch) in enumerate(session.held_out()):
        session.set_step(step, micro)
        count = int((batch["labels"] != IGNORE).sum())  # the last batch may be padded
        loss = session.captured.evaluate(batch, step, micro) if session.captured else session.loss(batch)
        totals[domain] = totals.get(domain, 0) + loss.double() * count
        targets[domain] = targets.get(domain, 0) + count
    session.model.train()
    session.monitor.meter.take()  # exchanges of validation are not the next step's
    # All domains in one sum over ranks: losses, then numbers of targets.
    mine = [*(float(total) for total in totals.values()), *targets.values()]
    sums = together.total(mine, session.device)
    losses, counts = sums[: len(totals)], sums[len(totals) :]
    whole = {"val_loss": sum(losses) / sum(counts)}
    if len(totals) == 1:
        return whole
    by_domain = zip(totals, losses, counts, strict=True)
    return whole | {f"val_loss/{name}": loss / count for name, loss, count in by_domain}


def train(session: Session, stop: StopRequest) -> list[dict[str, Any]]:
    """Runs to the last step, or to the end of the one in which a stop is asked for. Returns all rows."""
    config, steps = session.config, session.config.schedule.steps
    first, timed_s = session.step, 0.0
    for step in range(first, steps):
        started = time.perf_counter()
        row = train_step(session, step)
        step_seconds = time.perf_counter() - started
        session.step = step + 1
        last = session.step == steps

        if last or _due(session.step, config.validation.val_every):
            row |= validate(session, step)
        else:
            row.pop("tokens_per_expert", None)  # a long list: once a validation is enough

        seconds = time.perf_counter() - started
        session.elapsed_s += seconds
        if step > first:  # the first step compiles and warms up, so it predicts nothing
            timed_s += seconds
        row["elapsed_s"] = round(session.elapsed_s, 3)
        row["tokens_per_s"] = round(config.batch.tokens_per_step / step_seconds, 1)
        if session.peak_flops is not None:
            row["mfu"] = round(row["tokens_per_s"] * session.flops_per_token / session.peak_flops, 5)
        row["memory_gib"] = round(session.peak_memory() / 2**30, 3)
        if together.is_main():
            session.metrics.write(row)
        for sink in session.sinks:
            sink.write(session.step, scalars(row))

        if last or step == first or "val_loss" in row or _due(session.step, config.log.log_every):
            pace_s = timed_s / (step - first) if step > first else seconds
            print(metrics.step_line(row, steps, eta_s=pace_s * (steps - session.step)), flush=True)

        # A signal reaches the ranks in different steps: all stop after the one in which it reached any.
        stopped = stop.agree(session.device)
        if config.checkpoint.keep and (last or stopped or _due(session.step, config.checkpoint.save_every)):
            session.save()
        if stopped:
            break
    return together.on_main(lambda: metrics.read(session.run.metrics))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
