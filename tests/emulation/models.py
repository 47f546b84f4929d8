"""Plans of a few operators, each a stage, with times in milliseconds."""

from collections.abc import Sequence

from anabranch.cluster import Cluster
from anabranch.plans.plan import Plan, Prediction
from anabranch.profile.profile import Profile
from anabranch.schedule import SCHEDULES
from tests.simulator.helpers import Edges, chain, cluster, cost_model, stage_graph

__all__ = ["Edges", "chain", "job", "machines"]


def machines(
    *sizes: int, bandwidth: float = 1e9, latency_s: float = 1e-4, memory_bytes: int = 10**9
) -> Cluster:
    """A cluster with links of 1 GB/s and 100 us."""
    return cluster(*sizes, bandwidth=bandwidth, latency_s=latency_s, memory_bytes=memory_bytes)


def job(
    edges: Edges,
    devices: Sequence[tuple[int, ...]],
    on: Cluster,
    *,
    batch_size: int = 8,
    microbatch_size: int = 2,
    value_bytes: int = 1000,
    parameter_bytes: int = 1000,
    schedule: str = "1f1b",
) -> tuple[Plan, Profile]:
    """Operator i alone in stage i, 1 ms forward and 2 ms backward per sample."""
    count = len(devices)
    cost = cost_model(
        edges,
        [1e-3] * count,
        [2e-3] * count,
        on,
        value_bytes=value_bytes,
        parameter_bytes=parameter_bytes,
    )
    graph = stage_graph(edges, list(devices), batch_size, [microbatch_size] * count)
    graph = SCHEDULES[schedule]().warm_up(graph)
    nothing = Prediction(1.0, 1.0, 0.0, (0,) * len(graph.devices))
    plan = Plan(graph, schedule, "by hand", "", on.name, "", 0.0, 0.0, nothing, machines=on)
    return plan, cost.profile
