"""An emulation: plan, prices, order of messages, and the memory that the ranks share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Literal

import torch
from torch import fx, nn

from anabranch.cluster import Cluster
from anabranch.emulation.shared_links import SharedLinks
from anabranch.graph.cutting.split import Port, StageProgram
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.edges import edge_values
from anabranch.plans.plan import Plan
from anabranch.plans.prices import prices_of
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.remembered import remembered
from anabranch.runtime.messages import Layout
from anabranch.runtime.transport import Channel
from anabranch.runtime.worker import executed
from anabranch.schedule import schedule_of
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.sums import Sum, final_pieces, plan_sums

Links = Literal["modelled", "host"]


def require_time_scale(time_scale: float, links: Links) -> None:
    """Raise a ``ValueError`` for a time scale that is not positive, or for host links not 1."""
    if not 0 < time_scale <= 1e6:
        raise ValueError(f"the time scale is {time_scale}; it must be positive, and 1e6 at most")
    if links == "host" and time_scale != 1:
        raise ValueError("links of this machine cannot be slowed down; the time scale must be 1")


class Emulation:
    """A plan on emulated devices. Make it before the ranks are forked, once.

    Attributes:
        message_bytes: bytes of all messages of one step.

    Args:
        plan: a plan for devices of the cluster.
        links: ``modelled``: messages take as long as on the cluster; ``host``: as long as they do
            on this machine.

    Raises:
        InvalidPlanError: if the plan is for another model, a larger cluster, or has tensor
            parallelism.
        InvalidScheduleError: if its in-flight counts cannot be scheduled.
        ProfileError: if the profile has no times for the plan's micro-batches.
    """

    def __init__(
        self, plan: Plan, profile: Profile, cluster: Cluster, *, links: Links = "modelled"
    ) -> None:
        graph = plan.stage_graph
        self.plan, self.links = plan, links
        self.costs = ModelCosts(graph, prices_of(plan, profile, cluster))
        self.schedule = schedule_of(graph, plan.schedule, self.costs.message_edges)
        self.devices = graph.devices
        self._model, self._stages = profile, EmptyStages(profile.graph, graph)
        self.sums = plan_sums(self.costs, {s: len(x.devices) for s, x in enumerate(graph.stages)})
        self.final = final_pieces(self.sums)
        self.message_bytes = self.num_messages = 0
        channels = self._channels()
        for stage in range(len(graph)):
            for samples in graph.slice_sizes(stage):
                self.costs.compute_s(stage, samples)
        self.shared_links = SharedLinks(channels, cluster.num_ports, self.sums)

    def layout(self, device: int) -> Layout:
        return Layout(self._model.graph, self._stages, self.plan.stage_graph, device)

    def _channels(self) -> Counter[Channel]:
        """Return channel -> messages in a step."""
        graph = self.plan.stage_graph
        counts: Counter[Channel] = Counter()
        for rank, device in enumerate(self.devices):
            layout = self.layout(device)
            for action in executed(self.schedule, graph, device):
                if action.kind.is_receive:
                    sender = graph.rank_of[action.peer]
                    counts[Channel(sender, rank, layout.tag(action))] += 1
                    items = layout.items(action)
                    self.message_bytes += sum(i.shape.numel() * i.dtype.itemsize for i in items)
        self.num_messages = counts.total()
        return counts

    @property
    def sets(self) -> Collection[tuple[int, ...]]:
        """Sets of ranks that really reduce among themselves: none where links are modelled."""
        if self.links == "modelled":
            return ()
        return {self.ranks(work) for work in self.sums}

    def ranks(self, work: Sum) -> tuple[int, ...]:
        """Return the ranks of an all-reduce, ascending."""
        rank_of = self.plan.stage_graph.rank_of
        return tuple(sorted(rank_of[device] for device in work.devices))


class EmptyStages:
    """Stages of a profiled model that compute nothing, with messages of the right size.

    The profile has the values between stages: bytes per sample, and whether a gradient of the same
    size comes back. From ``StageProgram``s without calls ``Layout`` derives every message, as for a
    model.
    """

    def __init__(self, model: OpGraph, graph: StageGraph) -> None:
        self._model = model
        uses: dict[int, int] = defaultdict(int)
        ports = []
        for (source, target), values in edge_values(graph, model).items():
            for value in values:
                port = Port(value, source, target, uses[value], model.values[value].grad)
                uses[value] += 1
                ports.append(port)
        self._ports = sorted(ports, key=lambda port: (port.value, port.order))
        self._module = fx.GraphModule(nn.Module(), fx.Graph())

    @remembered
    def program(self, stage: int, samples: int) -> StageProgram:
        """Return the program of a stage for a number of samples, with values as bytes."""
        inputs = tuple(port for port in self._ports if port.target == stage)
        outputs = tuple(port for port in self._ports if port.source == stage)
        shapes = {p.value: (self._shape(p.value, samples), torch.uint8) for p in self._ports}
        return StageProgram(
            self._module, inputs, (), (), outputs, has_loss=False, metrics=(), shapes=shapes
        )

    def _shape(self, value: int, samples: int) -> torch.Size:
        spec = self._model.values[value]
        return torch.Size((samples, spec.nbytes) if spec.batched else (spec.nbytes,))
