"""The loop: sample and score, update, measure; once in a while evaluate and save.

Everything random is named by seed, step and place, and the rollouts of a step lie on disk before its first
update: a run that was killed and resumed writes what it would have written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nybble import together
from nybble.pretrain import metrics
from nybble.pretrain.session import Session
from nybble.pretrain.sinks import scalars
from nybble.pretrain.stop import StopRequest
from nybble.rl.collect import Collector, step_file
from nybble.rl.config import RLConfig
from nybble.rl.policy import Policy
from nybble.rl.position import Position
from nybble.rl.problems import Problems
from nybble.rl.report import reward_row, step_line
from nybble.rl.rollout import Rollout, groups
from nybble.rl.sampler import SamplingParams
from nybble.rl.totals import Totals
from nybble.rl.update import Updater

Group = Sequence[Rollout]


@dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of a run of reinforcement learning."""

    config: RLConfig
    session: Session
    policy: Policy
    position: Position
    collector: Collector
    problems: Problems
    held_out: Problems
    updater: Updater
    given: Sequence[Group] | None = None
    """Groups of --rollouts, in place of sampling."""


def train(run: Run, stop: StopRequest) -> list[dict[str, Any]]:
    """Runs to the last step, or to the end of the update in which a stop is asked for. Returns all rows."""
    config, session = run.config, run.session
    steps, first, timed_s = config.schedule.steps, session.step, 0.0
    for step in range(first, steps):
        started = time.perf_counter()
        if step == 0 and not run.position.evaluated:
            before = evaluate(run, step)
            run.position.evaluated = {f"{key}_before": value for key, value in before.items()}
        rollouts, next_problem = gather_rollouts(run, step)
        if not config.sample_only and not train_step(run, rollouts, step, stop):
            break
        row = finish_step(run, rollouts, step, next_problem)
        last = session.step == steps
        if last or _due(session.step, config.evaluation.eval_every):
            row |= evaluate(run, session.step)
        seconds = time.perf_counter() - started
        session.elapsed_s += seconds
        if step > first:
            timed_s += seconds
        row["elapsed_s"] = round(session.elapsed_s, 3)
        row["tokens_per_s"] = round(row["sampled_tokens"] / seconds, 1)
        row["memory_gib"] = round(session.peak_memory() / 2**30, 3)
        if together.is_main():
            session.metrics.write(row)
        for sink in session.sinks:
            sink.write(session.step, scalars(row))
        if last or step == first or "eval_reward" in row or _due(session.step, config.log.log_every):
            pace_s = timed_s / (step - first) if step > first else seconds
            print(step_line(row, steps, eta_s=pace_s * (steps - session.step)), flush=True)
        # A signal reaches the ranks at different times: all stop where it has reached any.
        stopped = stop.agree(session.device)
        due = last or stopped or _due(session.step, config.checkpoint.save_every)
        if due and not config.sample_only:
            session.save()
        if stopped:
            break
    return together.on_main(lambda: metrics.read(session.run.metrics))


def gather_rollouts(run: Run, step: int) -> tuple[list[Rollout], int]:
    """This rank's rollouts of a step, sampled or read, and the first problem of the next step."""
    config = run.config
    if run.given is not None:
        count = config.sampling.prompts
        mine = run.given[step * count : (step + 1) * count][together.rank() :: together.world()]
        return [rollout for group in mine for rollout in group], run.position.problem
    run.problems.skipped = 0
    posed, following = run.problems.take(run.position.problem, config.sampling.prompts)
    run.collector.engine.refresh(step * config.loss.updates)
    share = posed[together.rank() :: together.world()]
    path = step_file(run.session.run.path, step, together.rank())
    return together.all_or_none(lambda: run.collector.collect(share, step, path)), following


def train_step(run: Run, rollouts: Sequence[Rollout], step: int, stop: StopRequest) -> bool:
    """The updates of a step that are still to do; False if a stop was asked for before the last."""
    position, updates = run.position, run.config.loss.updates
    every = list(groups(rollouts))
    if updates > 1 and position.old is None:
        position.old = run.updater.score_before(every, step * updates, position.totals)
    while position.update < updates:
        u = position.update
        part = every[len(every) * u // updates : len(every) * (u + 1) // updates]
        run.updater.update(part, step, step * updates + u, position.totals, position.old)
        position.update += 1
        if stop.agree(run.session.device) and position.update < updates:
            position.join()
            run.session.save()
            return False
    return True


def finish_step(run: Run, rollouts: Sequence[Rollout], step: int, next_problem: int) -> dict[str, Any]:
    """Closes the books of a step; its row of metrics, with warnings printed."""
    position = run.position
    totals = Totals.of(position.totals.state())
    everything: list[Rollout] = []
    for rank, (theirs, sums) in enumerate(together.gather((list(rollouts), position.totals.state()))):
        everything += theirs
        if rank != together.rank():
            totals.add(Totals.of(sums))
    row: dict[str, Any] = {
        "step": step + 1,
        **reward_row(everything),
        "prompts_skipped": run.problems.skipped,
    }
    row |= position.evaluated
    position.evaluated = {}
    if not run.config.sample_only:
        row |= {"lr": run.session.optimiser.lr, **totals.row()}
        for warning in totals.mismatch.warnings(run.config.watch):
            print(f"warning: step {step + 1}: {warning}", flush=True)
    position.problem, position.update, position.old, position.totals = next_problem, 0, None, Totals()
    run.session.step = step + 1
    return row


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Mean greedy reward on the held-out problems with the policy after `step` steps; empty if turned off."""
    config = run.config
    if config.evaluation.eval_every == 0 or run.given is not None:
        return {}
    posed, _ = run.held_out.take(0, config.evaluation.eval_problems)
    posed = posed[together.rank() :: together.world()]
    params = SamplingParams(max_new_tokens=config.sampling.max_new_tokens, temperature=0.0)
    run.collector.engine.refresh(step * config.loss.updates)
    rewards: list[float] = []
    for start in range(0, len(posed), config.sampling.rows):
        part = posed[start : start + config.sampling.rows]
        rewards += [r.reward or 0.0 for r in run.collector.sample(part, step, 1, params)]
    everyone = [reward for rewards in together.gather(rewards) for reward in rewards]
    return {"eval_reward": fmean(everyone)} if everyone else {}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
