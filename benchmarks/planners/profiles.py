"""Every public profile on every preset cluster with 4, 8, 16 and 32 devices: are we ever behind?

The profiles are not part of this repository; ``--profiles`` names their folder. All plans are under
``auto``, so that every planner has the better of both warm-ups.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from anabranch.profile.readers import read_profile
from benchmarks.planners.common import Row, plan_row, table

PLANNERS = ("graphpipe", "sequential", "pipedream", "dapple", "piper", "data-parallel", "even")
DEVICES = (4, 8, 16, 32)
PRESETS = (
    "local:{d}",
    "summit:{n4}x4",
    "dapple-a:{n8}x{s8}",
    "dapple-b:{d}",
    "dapple-c:{d}",
    "dgx-h100:{n8}x{s8}",
)
SAME = 1e-6
"""Steps that differ by less are equal."""


def files(folder: Path) -> list[Path]:
    """The profiles in a folder and below, plans left out."""
    found = [*folder.rglob("*.txt"), *folder.rglob("*.json")]
    return sorted(
        path for path in found if "plans" not in path.parts[-2] and "LICENSE" not in path.name
    )


def clusters(devices: int) -> list[str]:
    """The presets with this many devices."""
    nodes = {"d": devices, "n4": devices // 4, "n8": max(1, devices // 8), "s8": min(8, devices)}
    return [preset.format(**nodes) for preset in PRESETS]


def cases(folder: Path, devices: tuple[int, ...] = DEVICES) -> Iterator[tuple[Path, str, int]]:
    """Profile, cluster and number of devices."""
    for path in files(folder):
        for count in devices:
            for cluster in clusters(count):
                yield path, cluster, count


def rows(
    folder: Path,
    planners: tuple[str, ...] = PLANNERS,
    devices: tuple[int, ...] = DEVICES,
    share: float = 1.0,
) -> Iterator[Row]:
    """One row per profile, cluster and planner; the batch is 2 profiled mini-batches per device.

    Args:
        folder: of the profiles.
        planners: to compare.
        devices: sizes of the clusters.
        share: of all cases, drawn at random with a fixed seed.
    """
    drawn = list(cases(folder, devices))
    random.Random(0).shuffle(drawn)
    for path, cluster, count in drawn[: max(1, round(share * len(drawn)))]:
        profile = read_profile(path)
        batch = 2 * profile.samples[0] * count
        for planner in planners:
            row = plan_row(planner, profile, cluster, batch)
            yield row | {"profile": str(path.relative_to(folder)), "devices": count}


def behind(found: list[Row]) -> list[tuple[float, Row, Row]]:
    """(factor, ours, theirs) where another planner's step is shorter than ours, worst first."""
    result = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["profile"], row["cluster"]), []).append(row)
    for group in groups.values():
        ours = next(row for row in group if row["planner"] == "graphpipe")
        others = [row for row in group if row is not ours and "step_s" in row]
        best = min(others, key=lambda row: row["step_s"], default=None)
        if best is None:
            continue
        factor = ours["step_s"] / best["step_s"] if "step_s" in ours else float("inf")
        if factor > 1 + SAME:
            result.append((factor, ours, best))
    return sorted(result, key=lambda each: -each[0])


def show(found: list[Row]) -> str:
    """How often each planner is best, and where we are behind."""
    groups = {(row["profile"], row["cluster"]) for row in found}
    late = behind(found)
    lines = [
        [theirs["planner"], theirs["profile"], theirs["cluster"], f"{factor:.4f}"]
        for factor, _, theirs in late[:20]
    ]
    text = f"behind in {len(late)} of {len(groups)} cases"
    return f"{text}\n\n{table(['planner', 'profile', 'cluster', 'ours over theirs'], lines)}"
