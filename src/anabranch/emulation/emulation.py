"""An emulation: plan, prices, order of messages, and the memory that the ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Literal

from anabranch.cluster import Cluster
from anabranch.cost.communication import Route
from anabranch.emulation.shared_links import Channel, SharedLinks
from anabranch.emulation.stages import EmptyStages
from anabranch.plans.plan import Plan
from anabranch.plans.prices import prices_of
from anabranch.profile.profile import Profile
from anabranch.runtime.messages import Layout
from anabranch.runtime.worker import executed
from anabranch.schedule import schedule_of
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.sums import Sum, final_pieces, plan_sums

Links = Literal["modelled", "host"]


def require_time_scale(time_scale: float, links: Links) -> None:
    """Raise a ``ValueError`` for a time scale that is not positive, or slows what it cannot."""
    if not 0 < time_scale <= 1e6:
        raise ValueError(f"the time scale is {time_scale}; it must be positive, and 1e6 at most")
    if links == "host" and time_scale != 1:
        raise ValueError("links of this machine cannot be slowed down; the time scale must be 1")


class Emulation:
    """A plan on emulated devices. Make it before the ranks are forked, once.

    Attributes:
        message_bytes: of all messages of one step.

    Args:
        plan: its devices must be those of the cluster.
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
        """The messages of a device."""
        return Layout(self._model.graph, self._stages, self.plan.stage_graph, device)

    def _channels(self) -> Counter[Channel]:
        """Channel -> messages in a step."""
        graph = self.plan.stage_graph
        counts: Counter[Channel] = Counter()
        for rank, device in enumerate(self.devices):
            layout = self.layout(device)
            for action in executed(self.schedule, graph, device):
                if action.kind.is_receive:
                    counts[graph.rank_of[action.peer], rank, layout.tag(action)] += 1
                    items = layout.items(action)
                    self.message_bytes += sum(i.shape.numel() * i.dtype.itemsize for i in items)
        self.num_messages = counts.total()
        return counts

    def route(self, source: int, target: int) -> Route:
        """The way from one rank to another."""
        return self.costs.route(self.devices[source], self.devices[target])

    @property
    def sets(self) -> Collection[tuple[int, ...]]:
        """Sets of ranks that really reduce among themselves: none where links are modelled."""
        if self.links == "modelled":
            return ()
        return {self.ranks(work) for work in self.sums}

    def ranks(self, work: Sum) -> tuple[int, ...]:
        """Ranks of an all-reduce, ascending."""
        rank_of = self.plan.stage_graph.rank_of
        return tuple(sorted(rank_of[device] for device in work.devices))
