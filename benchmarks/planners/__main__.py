"""Search time and predicted gain for the papers' models, and how search grows with the devices.

python -m benchmarks.planning [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from typing import Any

import anabranch
from anabranch.errors import InfeasiblePlanError
from anabranch.models import build
from anabranch.planner.stages import Plan
from anabranch.profile.profile import Profile

# Mini-batches per number of devices and search seconds as published (GraphPipe, A.2 and Table 1).
MODELS = {
    "mmt": ({4: 64, 8: 128, 16: 256, 32: 512}, {4: 0.12, 8: 0.76, 16: 3.00, 32: 10.11}),
    "dlrm": ({4: 256, 8: 512, 16: 1024, 32: 2048}, {4: 0.33, 8: 2.73, 16: 13.28, 32: 54.6}),
    "candle-uno": (
        {4: 4096, 8: 8192, 16: 16384, 32: 32768},
        {4: 0.19, 8: 1.43, 16: 6.14, 32: 22.37},
    ),
}
REPEATS = 3


def profile_of(name: str, largest: int) -> Profile:
    """The published size of a model, estimated for a V100."""
    workload = build(name, meta=True)
    captured = anabranch.capture(workload.module, workload.example)
    return anabranch.estimate(captured, "v100", tuple(1 << i for i in range(largest.bit_length())))


def search(planner: str, profile: Profile, devices: int, batch: int, **options: Any) -> Plan | None:
    """The plan on Summit nodes of four devices, or None where there is none."""
    cluster = anabranch.Cluster.preset(f"summit:{devices // 4}x4")
    try:
        return anabranch.plan(profile, cluster, batch, planner=planner, **options)
    except InfeasiblePlanError:
        return None


def median_search_s(find: Callable[[], Plan | None]) -> float:
    """Median of the search seconds of several plans."""
    found = [plan for plan in (find() for _ in range(REPEATS)) if plan is not None]
    return statistics.median(plan.search_s for plan in found) if found else float("nan")


def gains(rows: list[dict[str, Any]], profiles: dict[str, Profile]) -> None:
    """One row per model and number of devices."""
    for name, (batches, published) in MODELS.items():
        for devices, batch in batches.items():
            ours = search("graphpipe", profiles[name], devices, batch)
            assert ours is not None, f"no plan for {name} on {devices} devices"
            step = ours.predicted.step_s
            strongest = search("sequential", profiles[name], devices, batch)
            straight = search("sequential", profiles[name], devices, batch, max_replicas=1)
            rows.append(
                {
                    "model": name,
                    "devices": devices,
                    "batch": batch,
                    "step_s": step,
                    "depth": ours.stage_graph.depth,
                    "schedule": ours.schedule,
                    "gain_over_sequential": strongest and strongest.predicted.step_s / step,
                    "gain_over_straight": straight and straight.predicted.step_s / step,
                    "search_s": median_search_s(
                        lambda n=name, d=devices, b=batch: search("graphpipe", profiles[n], d, b)
                    ),
                    "simulate_s": ours.simulate_s,
                    "published_search_s": published[devices],
                }
            )


def case_study() -> dict[str, Any]:
    """GraphPipe, Figure 10: two branches on 8 devices, mini-batch 32, no replicas."""
    profile = profile_of("two-branch", 32)
    result: dict[str, Any] = {}
    for planner in ("graphpipe", "sequential"):
        for size in (2, None):
            plan = search(planner, profile, 8, 32, microbatch_size=size, max_replicas=1)
            assert plan is not None
            result[f"{planner}, micro-batch {size or 'searched'}"] = {
                "depth": plan.stage_graph.depth,
                "microbatch_size": plan.stage_graph.stages[0].microbatch_size,
                "schedule": plan.schedule,
                "step_s": plan.predicted.step_s,
            }
    return result


def growth(profile: Profile) -> list[dict[str, float]]:
    """Search seconds of mmt from 4 to 256 devices, 16 samples per device."""
    return [
        {
            "devices": devices,
            "search_s": median_search_s(
                lambda d=devices: search("graphpipe", profile, d, 16 * d, schedule="1f1b")
            ),
        }
        for devices in (4, 8, 16, 32, 64, 128, 256)
    ]


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    profiles = {name: profile_of(name, max(b.values())) for name, (b, _) in MODELS.items()}
    rows: list[dict[str, Any]] = []
    gains(rows, profiles)
    result = {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "plans": rows,
        "case_study": case_study(),
        "growth": growth(profile_of("mmt", 16 * 256)),
    }
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print("| model | devices | step ms | over sequential | over straight | search s | published |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        figures = [row["gain_over_sequential"], row["gain_over_straight"]]
        over = " | ".join(f"{gain:.2f}x" if gain else "-" for gain in figures)
        print(
            f"| {row['model']} | {row['devices']} | {row['step_s'] * 1e3:.1f} | {over} | "
            f"{row['search_s']:.3f} | {row['published_search_s']} |"
        )
    print("\nCase study (two-branch, 8 devices, mini-batch 32, no replicas):")
    for name, each in result["case_study"].items():
        print(f"  {name}: depth {each['depth']}, {each['schedule']}, {each['step_s'] * 1e3:.2f} ms")
    print("\nSearch seconds by devices (mmt):")
    for each in result["growth"]:
        print(f"  {each['devices']:4d}: {each['search_s']:.3f}")


if __name__ == "__main__":
    main()
