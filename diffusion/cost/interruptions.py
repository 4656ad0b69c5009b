"""The cost of failures and checkpoints, and the best interval between saves."""

from __future__ import annotations

import math

import numpy as np

from diffusion.cost.formulas import Number


def young_sec(save_sec: float, between_failures_sec: float) -> float:
    """Interval that loses least time to first order, sqrt(2 C M). J. W. Young, Communications of the ACM 17(9), 1974."""
    return math.sqrt(2 * save_sec * between_failures_sec)


def daly_sec(save_sec: float, between_failures_sec: float) -> float:
    """The same from the end of a save to the begin of the next, for C << M. J. T. Daly, Future Generation Computer Systems 22(3), 2006."""
    return young_sec(save_sec, between_failures_sec) - save_sec


def best_interval_sec(save_sec: float, between_failures_sec: float, restart_sec: float) -> float:
    """Interval from save to save of the highest availability, C + sqrt(2 (M + R) C + C^2). arXiv 2410.18124.

    Args:
        save_sec: C, for which training stands still.
        between_failures_sec: M, of the whole job.
        restart_sec: R, from the start of a process to its first step.
    """
    return save_sec + math.sqrt(2 * (between_failures_sec + restart_sec) * save_sec + save_sec**2)


def overhead(interval_sec: float, save_sec: float, between_failures_sec: float, restart_sec: float, notice_sec: float = 0.0) -> float:
    """Share of the time that saving and failing cost, to first order: C / tau + (tau / 2 + D + R) / M.

    Args:
        notice_sec: D, until someone has seen the failure and started again.
    """
    return save_sec / interval_sec + (interval_sec / 2 + notice_sec + restart_sec) / between_failures_sec


def expected_stretch(interval_sec: Number, save_sec: Number, between_failures_sec: Number, restart_sec: Number, notice_sec: Number = 0.0) -> Number:
    """Expected wall time over useful time when failures are exponential, exactly: M e^((D + R) / M) (e^((tau + C) / M) - 1) / tau.

    The complete model of J. T. Daly, Future Generation Computer Systems 22(3), 2006; `overhead` is its first order, 1 + C / tau its limit without
    failures. Restarts and saves can fail too. Arguments may be arrays. Infinite where no interval is ever survived.

    Args:
        interval_sec: tau, work from the end of a save to the begin of the next.
        save_sec: C.
        between_failures_sec: M, of the whole job; infinite is never.
        restart_sec: R.
        notice_sec: D.
    """
    segment_sec, per_sec = np.add(interval_sec, save_sec), np.divide(1.0, between_failures_sec)
    with np.errstate(over='ignore'):
        passed_sec = segment_sec * _growth(segment_sec * per_sec) * np.exp(np.add(restart_sec, notice_sec) * per_sec)
    return passed_sec / interval_sec


def _growth(x: Number) -> Number:
    """(e^x - 1) / x, 1 at 0."""
    x = np.asarray(x, dtype=float)
    return np.where(x == 0, 1.0, np.expm1(x) / np.where(x == 0, 1.0, x))
