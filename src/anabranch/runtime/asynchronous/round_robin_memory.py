"""Memory of replicas that take mini-batches in turn, each of them whole.

A plan predicts the peaks of replicas that split mini-batches: fewer bytes of more of them. Bytes
per sample follow from the model, so the need is computed here without the plan's profile.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.graph.capture import Captured
from anabranch.plans.check import stage_bytes
from anabranch.plans.plan import Plan
from anabranch.profile.estimate import estimate
from anabranch.runtime.asynchronous.round_robin import RoundRobin
from anabranch.weights import WeightPolicy, versions_held


def budgeted(
    plan: Plan,
    rounds: RoundRobin,
    captured: Captured,
    policy: WeightPolicy,
    *,
    last_update: bool = False,
) -> Plan:
    """The plan with the peaks of whole mini-batches; one that predicts no peaks stays as it is."""
    if plan.predicted is None or not any(plan.predicted.device_peak_bytes):
        return plan
    size, whole = plan.stage_graph.batch_size, rounds.one(0, plan.stage_graph.batch_size)
    cluster = plan.machines or Cluster.preset(f"local:{len(plan.stage_graph.devices)}")
    cost = CostModel(estimate(captured, samples=(size,)), cluster)
    peaks: dict[int, int] = {}
    for s, stage in enumerate(plan.stage_graph.stages):
        distance, depth = rounds.place(s)
        held = rounds.in_flight[s]
        versions = versions_held(
            policy, in_flight=held, distance=distance, depth=depth, last_update=last_update
        )
        nbytes = stage_bytes(whole, cost, s, in_flight=held, versions=versions)
        peaks |= dict.fromkeys(stage.devices, int(nbytes))
    ordered = tuple(peaks[device] for device in plan.stage_graph.devices)
    return replace(plan, predicted=replace(plan.predicted, device_peak_bytes=ordered))
