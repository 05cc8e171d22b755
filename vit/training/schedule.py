"""The learning rate schedule. Imports no torch."""

import math

from vitline.vit.config import OptimConfig


def lr_at(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (1 to total_steps): linear warmup from zero, then decay to `end_lr`.

    lr(t) = decay(progress) * min(1, t / warmup), progress = (t - warmup) / (total - warmup), as in the paper's code.
    A staircase measures progress from step 1 and divides by ten at each of `milestones`, as in BiT's bit_hyperrule.py.
    `decay_steps` stands in for the total where it is set. All this begins after `head_first_steps` at the peak. In the last
    `cooldown_steps` the learning rate falls linearly to zero from where it was when they began (arXiv:2106.04560, Sec. 3.5;
    arXiv:2405.18392).
    The learning rate depends only on the step, so there is no scheduler state to save and restore.
    """
    if config.cooldown_steps and step > (begin := total_steps - config.cooldown_steps):
        return _scheduled(begin, config, total_steps) * (total_steps - step) / config.cooldown_steps
    return _scheduled(step, config, total_steps)


def _scheduled(step: int, config: OptimConfig, total_steps: int) -> float:
    """The learning rate without a cooldown."""
    if step <= config.head_first_steps:
        return config.peak_lr
    step -= config.head_first_steps
    warmup, total_steps = config.warmup_steps, (config.decay_steps or total_steps) - config.head_first_steps
    if config.schedule == "staircase":
        lr = config.peak_lr * 0.1 ** sum(step > round(at * total_steps) for at in config.milestones)
        return lr * min(1.0, step / warmup) if warmup else lr
    progress = min(max((step - warmup) / max(total_steps - warmup, 1), 0.0), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    lr = config.end_lr + (config.peak_lr - config.end_lr) * shape
    return lr * min(1.0, step / warmup) if warmup else lr
