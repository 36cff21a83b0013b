"""Expectation maximisation for additive codebooks whose centres commute with rotary embedding.

CommVQ (arXiv 2506.18879, section 4): read a key as complex numbers, one for each pair of channels
that RoPE turns. A centre is ``z_a + i z_b`` with both from one table of ``N`` complex vectors, so
turning a centre by a phase of each pair is turning the table. Channels that do not rotate are
free: their part of a centre is ``u_a + v_b`` from two tables.

Soft assignments are those of a Gaussian mixture, ``w_ab ~ exp(-|x - z_a - i z_b|^2 / t)``, where
the paper uses the distance itself. Squared, a weight is the product of a factor for ``a``, one for
``b`` and one for both: all sums over the ``N^2`` centres become matrix products, two orders of
magnitude cheaper. ``t`` falls relative to the residual's variance; hard rounds follow.

Tables that were fitted to few points are too long for others: points may be held out, and each
stage's tables are then scaled to serve these best before the next stage begins.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.stages.hashing import hashed

Float64 = NDArray[np.float64]
Rows = NDArray[np.intp]

_MANY = 32  # points an entry, from which on every second one does, but in the last rounds
_LAST = 2
_COLDEST = 8.0  # 2 variance / t of the last soft round; the first has 1
_SCALINGS = 3  # the nearest centre depends on the scale, so it is found in a few steps
_LEAST, _MOST = 0.25, 1.5  # of one such step
_PULL = 1e-6  # of an entry's fair share of the points: how firmly an unused entry stays
_UNDERFLOW = 1e-290
_CHUNK = 64  # points at a time: their distances to all centres fit a core's own cache


@frozen(eq=False)
class CommutingTables:
    """Tables of ``R`` stages; entry 0 of each is zero, so that no stage can add to an error.

    Attributes:
        turning: ``(..., R, N, 2, P)`` float32, real and imaginary parts for the pairs that rotate.
        still: ``(..., R, 2, N, Q)`` float32, ``u`` and ``v`` for the channels that do not.
        error: ``(R + 1, ...)`` mean squared length of the residual before and after each stage.
    """

    turning: NDArray[np.float32]
    still: NDArray[np.float32]
    error: Float64


@frozen(eq=False)
class Stage:
    """The tables of one stage, ``(N, P)`` complex128 and ``(2, N, Q)`` float64."""

    turning: NDArray[np.complex128]
    still: Float64

    @property
    def sides(self) -> tuple[Float64, Float64]:
        """``U`` and ``V``, ``(N, 2 P + Q)`` each: centre ``ab`` is ``U_a + V_b``.

        Real and imaginary parts of the pairs first, then what does not rotate, as in points.
        """
        real, imaginary = self.turning.real, self.turning.imag
        return (
            np.concatenate([real, imaginary, self.still[0]], axis=1),
            np.concatenate([-imaginary, real, self.still[1]], axis=1),
        )


@frozen(eq=False)
class Sums:
    """What the M-step needs to know of the weights ``w_ab`` of all points ``x``.

    Attributes:
        joint: ``(N, N)``, the sums of ``w_ab``.
        direct: ``(N, D)``, of ``w_ab x`` over ``b`` too.
        turned: ``(N, D)``, of ``w_ab x`` over ``a`` too.
        points: Number of points.
    """

    joint: Float64
    direct: Float64
    turned: Float64
    points: int


def fit_commuting(
    pairs: NDArray[np.complexfloating],
    rest: NDArray[np.floating] | None = None,
    *,
    stages: int,
    entries: int = 64,
    seed: int,
    rounds: int = 10,
    hard_rounds: int = 2,
    held_out: int = 0,
) -> CommutingTables:
    """Fit the tables stage by stage, each to what the stages before it leave.

    Args:
        pairs: ``(..., n, P)`` complex, unrotated; each ``(n, P)`` is a problem by itself.
        rest: ``(..., n, Q)`` channels that do not rotate.
        stages: Stages, ``R``.
        entries: Entries of a table, ``N``: a stage has ``N^2`` centres.
        seed: Draws the points that the tables start from.
        rounds: Soft rounds of a stage.
        hard_rounds: Rounds with each point at its nearest centre, after the soft ones.
        held_out: Of so many points one is not fitted to and decides the scale, at least 2; 0 fits
            to all of them.

    Raises:
        ConfigError: There are fewer points to fit to than entries, or something is not finite.
    """
    if rest is None:
        rest = np.zeros((*pairs.shape[:-1], 0))
    points = np.concatenate([pairs.real, pairs.imag, rest], axis=-1).astype(np.float64)
    shape, (n, D), P = points.shape[:-2], points.shape[-2:], pairs.shape[-1]
    held = np.arange(n) % held_out == held_out - 1 if held_out else np.zeros(n, dtype=bool)
    fitted = n - int(held.sum())
    if fitted < entries:
        raise ConfigError(f"fit_commuting: {entries} entries need as many points (got {fitted})")
    if not np.isfinite(points).all():
        raise ConfigError("fit_commuting: points must be finite")
    turning, still, errors = [], [], []
    for residual in points.reshape(-1, n, D):
        errors.append(_mean_length(residual))
        for place in range(stages):
            order = np.argsort(hashed(fitted, "commuting", seed, place), kind="stable")
            stage = _fit_stage(residual[~held], P, order[:entries], rounds, hard_rounds)
            stage = _scaled(stage, residual[held])
            residual = _residual(residual, stage, *nearest_centres(residual, stage))
            turning.append(np.stack([stage.turning.real, stage.turning.imag], axis=1))
            still.append(stage.still)
            errors.append(_mean_length(residual))
    return CommutingTables(
        np.array(turning, dtype=np.float32).reshape(*shape, stages, entries, 2, P),
        np.array(still, dtype=np.float32).reshape(*shape, stages, 2, entries, D - 2 * P),
        np.moveaxis(np.array(errors).reshape(*shape, stages + 1), -1, 0),
    )


def _mean_length(points: Float64) -> float:
    return float(np.square(points).sum() / len(points))


def _fit_stage(points: Float64, pairs: int, start: Rows, rounds: int, hard_rounds: int) -> Stage:
    """One stage; of the hard rounds those that gain."""
    first = points[start] / 2
    first[0] = 0
    rest = first[:, 2 * pairs :]
    stage = Stage(first[:, :pairs] + 1j * first[:, pairs : 2 * pairs], np.stack([rest, rest]))
    variance = _mean_length(points) / points.shape[1]
    if variance > 0:
        few = points[::2] if len(points) >= _MANY * len(start) else points
        for place, heat in enumerate(np.geomspace(1.0, _COLDEST, rounds)):
            some = points if place >= rounds - _LAST else few
            stage = maximised(soft_sums(some, stage, 2 * variance / heat), stage)
    if not hard_rounds:
        return stage
    a, b = nearest_centres(points, stage)
    left = _mean_length(_residual(points, stage, a, b))
    for _ in range(hard_rounds):
        tried = maximised(hard_sums(points, a, b, len(start)), stage)
        a, b = nearest_centres(points, tried)
        tried_left = _mean_length(_residual(points, tried, a, b))
        if tried_left >= left:
            break
        stage, left = tried, tried_left
    return stage


def _scaled(stage: Stage, points: Float64) -> Stage:
    """The tables times the factor with which points that they were not fitted to err least."""
    for _ in range(_SCALINGS):
        left = _residual(points, stage, *nearest_centres(points, stage))
        centres = points - left
        energy = np.square(centres).sum()
        if not energy > 0:
            break
        factor = np.clip((points * centres).sum() / energy, _LEAST, _MOST)
        stage = Stage(stage.turning * factor, stage.still * factor)
    return stage


def _residual(points: Float64, stage: Stage, a: Rows, b: Rows) -> Float64:
    direct, turned = stage.sides
    return np.asarray(points - direct[a] - turned[b])


def _energies(direct: Float64, turned: Float64) -> Float64:
    """``|U_a + V_b|^2``, ``(N, N)``."""
    squares = np.square(direct).sum(axis=1)[:, None] + np.square(turned).sum(axis=1)
    return np.asarray(squares + 2.0 * direct @ turned.T)


def soft_sums(points: Float64, stage: Stage, temperature: float) -> Sums:
    """The E-step: ``w_ab ~ exp(-|x - U_a - V_b|^2 / t)``, normalised over the centres.

    A point so far from every centre that its weights underflow is left out of the round.
    """
    direct, turned = stage.sides
    energies = _energies(direct, turned)
    affinity = np.exp((energies.min() - energies) / temperature)
    joint = np.zeros_like(energies)
    to_direct, to_turned = np.zeros_like(direct), np.zeros_like(turned)
    for start in range(0, len(points), _CHUNK):
        rows = points[start : start + _CHUNK]
        of_a = rows @ direct.T * (2.0 / temperature)
        of_b = rows @ turned.T * (2.0 / temperature)
        of_a = np.exp(of_a - of_a.max(axis=1, keepdims=True))
        of_b = np.exp(of_b - of_b.max(axis=1, keepdims=True))
        over_b = of_b @ affinity.T
        total = (of_a * over_b).sum(axis=1, keepdims=True)
        of_a = np.where(total > _UNDERFLOW, of_a / np.maximum(total, _UNDERFLOW), 0.0)
        joint += of_a.T @ of_b
        to_direct += (of_a * over_b).T @ rows
        to_turned += (of_b * (of_a @ affinity)).T @ rows
    return Sums(joint * affinity, to_direct, to_turned, len(points))


def hard_sums(points: Float64, a: Rows, b: Rows, entries: int) -> Sums:
    """The sums with each point wholly at one centre."""
    joint = np.bincount(a * entries + b, minlength=entries**2).astype(np.float64)
    direct, turned = (_summed(points, side, entries) for side in (a, b))
    return Sums(joint.reshape(entries, entries), direct, turned, len(points))


def _summed(points: Float64, side: Rows, entries: int) -> Float64:
    """The sum of each entry's points, ``(N, D)``, added in order."""
    order = np.argsort(side, kind="stable")
    used, starts = np.unique(side[order], return_index=True)
    sums = np.zeros((entries, points.shape[1]))
    sums[used] = np.add.reduceat(points[order], starts)
    return sums


def maximised(sums: Sums, stage: Stage) -> Stage:
    """The M-step: the tables of least weighted squared error, in closed form.

    With the weights fixed the error is a quadratic form in the table, the same for every pair:
    one Hermitian ``N x N`` system, and one real ``2 N x 2 N`` system for what does not rotate.
    """
    N, P = stage.turning.shape
    pull = _PULL * sums.points / N
    mass_a, mass_b = sums.joint.sum(axis=1), sums.joint.sum(axis=0)
    system = np.diag(mass_a + mass_b + pull) + 1j * (sums.joint - sums.joint.T)
    direct = sums.direct[:, :P] + 1j * sums.direct[:, P : 2 * P]
    turned = sums.turned[:, :P] + 1j * sums.turned[:, P : 2 * P]
    wanted = direct - 1j * turned + pull * stage.turning
    turning = np.zeros_like(stage.turning)
    turning[1:] = np.linalg.solve(system[1:, 1:], wanted[1:])

    still = np.zeros_like(stage.still)
    if still.size:
        corner = sums.joint[1:, 1:]
        free = np.block(
            [
                [np.diag(mass_a[1:] + pull), corner],
                [corner.T, np.diag(mass_b[1:] + pull)],
            ]
        )
        rest = np.stack([sums.direct[:, 2 * P :], sums.turned[:, 2 * P :]]) + pull * stage.still
        solved = np.linalg.solve(free, rest[:, 1:].reshape(2 * (N - 1), -1))
        still[:, 1:] = solved.reshape(2, N - 1, -1)
    return Stage(turning, still)


def nearest_centres(points: Float64, stage: Stage) -> tuple[Rows, Rows]:
    """The ``a`` and ``b`` of each point's nearest centre, to the precision of float32."""
    direct, turned = (side.astype(np.float32) for side in stage.sides)
    N = len(direct)
    half = (_energies(*stage.sides) / 2).astype(np.float32)
    codes = np.empty(len(points), dtype=np.intp)
    for start in range(0, len(points), _CHUNK):
        rows = points[start : start + _CHUNK].astype(np.float32)
        distances = half - (rows @ direct.T)[:, :, None]
        distances -= (rows @ turned.T)[:, None, :]
        codes[start : start + len(rows)] = distances.reshape(len(rows), -1).argmin(axis=1)
    return codes // N, codes % N
