"""The warm-up, stable, decay schedule, as a pure function of the step: to resume, the step is enough."""

from nybble.pretrain.config import ScheduleConfig


def lr_factor(step: int, config: ScheduleConfig) -> float:
    """Fraction of the peak rate at optimiser step `step` (from 0).

    Linear from 1 / warmup to 1 over the warm-up, then 1, then linear down to `final_lr`, which the last
    step has. When warm-up and decay overlap, the smaller of the two applies.
    """
    up = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    decay_steps = round(config.steps * config.decay)
    done = step - (config.steps - 1 - decay_steps)  # steps of the decay behind us, this one included
    if decay_steps == 0 or done <= 0:
        return up
    down = 1.0 - (1.0 - config.final_lr) * min(done, decay_steps) / decay_steps
    return min(up, down)
