"""The evaluator of the planner ``auto`` against the simulator: how right it is, and how quick.

Random drafts of each model run through both. NumPy's column is another way to be quick, a
population of drafts at once, in arrays with an entry per draft, for a smaller model: links without
contention, no all-reduces, prices given.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.evaluator import Evaluator
from anabranch.profile.profile import Profile
from benchmarks.planners.common import Row, profile_of, table
from benchmarks.planners.published import read_profile
from tests.planner.auto.random_drafts import random_draft
from tests.planner.auto.simulated import simulated_s

CLUSTER = "summit:8x4"
MODELS = {"mmt": 512, "dlrm": 2048, "candle-uno": 32768, "two-branch": 256}
"""Mini-batches at 32 devices."""

DRAFTS = 200
"""Drafts of a model that can run, at most."""

MOST_MICROBATCHES = 64
"""Of a draft: more take the simulator long."""

POPULATION, STAGES, MICROBATCHES = 1000, 9, 16
"""Drafts at once for NumPy, and what each has."""

Floats = NDArray[np.float64]


def rows(folder: Path | None = None) -> list[Row]:
    """A row per model; with a folder of public profiles also some of those."""
    return [_row(name, profile, batch) for name, profile, batch in _models(folder)]


def _models(folder: Path | None) -> Iterator[tuple[str, Profile, int]]:
    for name, batch in MODELS.items():
        yield name, profile_of(name, batch), batch
    for path in sorted(folder.glob("dapple/*.txt"))[::3] if folder else ():
        profile = read_profile(path)
        yield path.stem, profile, 64 * profile.samples[0]


def _row(name: str, profile: Profile, batch_size: int) -> Row:
    cost = CostModel(profile, Cluster.preset(CLUSTER))
    evaluator = Evaluator(cost, batch_size)
    started = time.perf_counter()
    drafts = list(_drafts(cost, batch_size, evaluator))
    first_s = time.perf_counter() - started
    evaluated, evaluator_s = _timed(evaluator, drafts)
    simulated, simulator_s = _timed(lambda draft: simulated_s(cost, batch_size, draft), drafts)
    errors = np.abs(evaluated / simulated - 1)
    return {
        "model": name,
        "drafts": len(drafts),
        "median_error": float(np.median(errors)),
        "error_95": float(np.quantile(errors, 0.95)),
        "worst_error": float(errors.max()),
        "rank_correlation": _rank_correlation(evaluated, simulated),
        "evaluator_s": evaluator_s,
        "simulator_s": simulator_s,
        "numpy_s": _population_s(),
        "first_s": first_s,
    }


def _drafts(cost: CostModel, batch_size: int, evaluator: Evaluator) -> Iterator[Draft]:
    """Drafts that can run, half of them with everything different from stage to stage."""
    found = 0
    for seed in range(50 * DRAFTS):
        draft = random_draft(cost, batch_size, seed, plain=seed % 2 == 0)
        if batch_size > MOST_MICROBATCHES * min(draft.microbatch):
            continue
        if math.isfinite(evaluator(draft)):
            yield draft
            found += 1
        if found == DRAFTS:
            return


def _timed(price, drafts: list[Draft]) -> tuple[Floats, float]:
    """What is said of each draft, and the seconds that one takes."""
    started = time.perf_counter()
    found = np.array([price(draft) for draft in drafts])
    return found, (time.perf_counter() - started) / len(drafts)


def _rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's."""
    ranks = (np.argsort(np.argsort(found)) for found in (a, b))
    return float(np.corrcoef(*ranks)[0, 1])


def _population_s() -> float:
    """Seconds per draft of ``population_steps``, for random seconds and edges."""
    rng = np.random.default_rng(0)
    forward = rng.random((POPULATION, STAGES))
    edges = np.triu(rng.random((POPULATION, STAGES, STAGES)) < 0.3, 1)
    started = time.perf_counter()
    population_steps(forward, 2 * forward, edges, 0.01, MICROBATCHES)
    return (time.perf_counter() - started) / POPULATION


def population_steps(
    forward: Floats, backward: Floats, edges: NDArray[np.bool_], message_s: float, count: int
) -> Floats:
    """Steps of many drafts at once under 1F1B; [drafts, stages] and [drafts, stages, stages].

    In every round each stage does its next action if what it waits for is known.
    """
    drafts, stages = forward.shape
    height = np.zeros((drafts, stages), dtype=np.int64)
    for s in reversed(range(stages)):
        height[:, s] = np.max((height + 1) * edges[:, s], axis=1)
    ahead = np.minimum(height + 1, count)
    ends = np.full((2, drafts, stages, count + 1), np.inf)
    done = np.zeros((2, drafts, stages), dtype=np.int64)
    free = np.zeros((drafts, stages))
    which = np.arange(drafts)[:, None], np.arange(stages)[None, :]
    draft, stage = np.arange(drafts)[:, None, None], np.arange(stages)[None, :, None]
    while (done[1] < count).any():
        is_backward = (done[0] >= np.minimum(count, ahead + done[1])).astype(np.int64)
        number = np.where(is_backward, done[1], done[0])
        # What each stage has of the micro-batch that each other one wants.
        before = ends[0][draft, stage, number[:, None, :]]
        after = ends[1][draft, stage.swapaxes(1, 2), number[:, :, None]]
        forward_at = np.where(edges, before + message_s, 0.0).max(axis=1)
        backward_at = np.where(edges, after + message_s, 0.0).max(axis=2)
        start = np.maximum(free, np.where(is_backward, backward_at, forward_at))
        end = start + np.where(is_backward, backward, forward)
        ready = np.isfinite(end) & (number < count)
        free = np.where(ready, end, free)
        place = is_backward, *which, np.minimum(number, count)
        ends[place] = np.where(ready, end, ends[place])
        done[(is_backward, *which)] += ready
    return free.max(axis=1)


def show(found: list[Row]) -> str:
    """Error and speed per model."""
    columns = ["model", "drafts", "error: median, 95 %, worst", "rank correlation", "evaluator"]
    lines = [
        [
            row["model"],
            str(row["drafts"]),
            ", ".join(f"{row[key]:.1%}" for key in ("median_error", "error_95", "worst_error")),
            f"{row['rank_correlation']:.4f}",
            *(f"{1e6 * row[key]:.0f} us" for key in ("evaluator_s", "simulator_s", "numpy_s")),
        ]
        for row in found
    ]
    return table([*columns, "simulator", "numpy, without links and sums"], lines)


if __name__ == "__main__":
    sys.stdout.write(f"{show(rows(Path(sys.argv[1]) if len(sys.argv) > 1 else None))}\n")
