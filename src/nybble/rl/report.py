"""What a step shows: its row of metrics and its line on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from nybble.pretrain.metrics import duration
from nybble.rl.rollout import Rollout, groups


def reward_row(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards, lengths and groups of the rollouts of a step."""
    rewards = [r.reward for r in rollouts if r.reward is not None]
    each = [[r.reward for r in group if r.reward is not None] for group in groups(rollouts)]
    lengths = [len(r.tokens) for r in rollouts]
    row: dict[str, float] = {
        "reward": statistics.fmean(rewards) if rewards else 0.0,
        "rollouts": len(rollouts),
        "reward_errors": len(rollouts) - len(rewards),
        "groups": len(each),
        "groups_equal": sum(bool(group) and min(group) == max(group) for group in each),
        "length": statistics.fmean(lengths) if lengths else 0.0,
        "length_max": max(lengths, default=0),
        "stopped": statistics.fmean(r.finish == "stop" for r in rollouts) if rollouts else 0.0,
        "sampled_tokens": sum(lengths),
    }
    return row


def step_line(row: dict[str, Any], steps: int, eta_s: float) -> str:
    """Reward, mismatch, entropy, length, speed and time left."""
    width = len(str(steps))
    parts = [f"step {row['step']:>{width}}/{steps}", f"reward {row['reward']:.3f}"]
    if "eval_reward_before" in row:
        parts.append(f"held out before {row['eval_reward_before']:.3f}")
    if "eval_reward" in row:
        parts.append(f"held out {row['eval_reward']:.3f}")
    parts.append(f"equal groups {row['groups_equal']}/{row['groups']}")
    if "mismatch_k3" in row:
        parts.append(f"k3 {row['mismatch_k3']:.1e}")
        parts.append(f"ratio max {row['mismatch_ratio_max']:.3f}")
    if "mismatch_experts" in row:
        parts.append(f"rerouted {row['mismatch_experts']:.1%}")
    if "entropy" in row:
        parts.append(f"entropy {row['entropy']:.3f}")
    parts.append(f"length {row['length']:.1f}")
    if "grad_norm" in row:
        parts.append(f"grad {row['grad_norm']:.2f}")
    parts.append(f"eta {duration(eta_s)}")
    return "  ".join(parts)
