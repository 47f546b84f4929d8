"""Piper's recurrence as the paper writes it, on prices straight from the cost model."""

from dataclasses import dataclass, replace
from functools import cached_property

from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.cost.communication import all_reduce_s
from anabranch.graph.opgraph import BATCH, LookupTable, Op, OpGraph, Value, bits
from anabranch.planner.toolkit.downsets import downsets
from anabranch.planner.toolkit.prices import MicrobatchPrices, Mode
from anabranch.profile.profile import OpCost, Profile
from tests.strategies import planning_profiles

NEVER = float("inf")


@dataclass(frozen=True)
class Reference:
    """best(D, k, s), term by term."""

    cost: CostModel
    batch_size: int
    size: int
    degrees: tuple[int, ...] = ()

    @cached_property
    def prices(self) -> MicrobatchPrices:
        """With recomputation."""
        memory = self.cost.cluster.memory_bytes
        return MicrobatchPrices(self.cost, self.batch_size, self.size, self.degrees, memory, True)

    @cached_property
    def downsets(self) -> list[int]:
        """All of them."""
        return downsets(self.cost.graph, 10**5)

    def load_s(self, mask: int, mode: Mode) -> float:
        """Compute, all that crosses the border either way, and a share of the all-reduce."""
        n, ops = self.prices.samples(mode.replicas), list(bits(mask))
        seconds = sum(self.cost.stage_s(mask, n, recompute=mode.recompute))
        nbytes = 0.0
        for value in self.cost.graph.values:
            made = value.producer != BATCH and mask >> value.producer & 1
            inside = [consumer for consumer in value.consumers if mask >> consumer & 1]
            leaves = made and len(inside) < len(value.consumers)
            enters = not made and value.producer != BATCH and inside
            nbytes += value.size(n) * (1 + value.grad) * bool(leaves or enters)
        seconds += nbytes * self.cost.border_price(mode.replicas)
        reduced = self.cost.stage_parameter_bytes(ops).summed
        reduce_s = all_reduce_s(reduced, *self.prices.ring(mode.replicas))
        return seconds + float(reduce_s) / self.prices.num_microbatches

    def fits(self, mask: int, mode: Mode, behind: int) -> bool:
        """Whether a stage with so many stages behind it fits."""
        need = self.cost.device_bytes(
            bits(mask),
            microbatch_size=self.size,
            replicas=mode.replicas,
            in_flight=min(behind + 1, self.prices.num_microbatches),
            recompute=mode.recompute,
        )
        return need <= self.cost.cluster.memory_bytes

    def best(self) -> dict[tuple[int, int], float]:
        """(devices, stages) -> least load of the whole model on exactly so many."""
        total = self.cost.cluster.num_devices
        whole = self.downsets[-1]
        best: dict[int, dict[tuple[int, int], float]] = {whole: {(0, 0): 0.0}}
        for lo in reversed(self.downsets[:-1]):
            here = best.setdefault(lo, {})
            for hi in self.downsets:
                if hi == lo or hi & lo != lo:
                    continue
                for mode in self.prices.modes:
                    load = self.load_s(hi & ~lo, mode)
                    for (devices, stages), known in best[hi].items():
                        key = devices + mode.replicas, stages + 1
                        if key[0] <= total and self.fits(hi & ~lo, mode, stages):
                            here[key] = min(here.get(key, NEVER), max(load, known))
        return best[0]


@st.composite
def rich_profiles(draw: st.DrawFn, max_ops: int = 5) -> Profile:
    """With all that is allowed: shared and frozen parameters, values without a batch dimension,
    tables that are looked up, operators that cost nothing, and passes that take memory.
    """
    profile = draw(planning_profiles(max_ops, series_parallel=False))
    graph = profile.graph
    shared = [draw(st.integers(0, i)) if draw(st.booleans()) else i for i in range(len(graph))]
    ops = tuple(Op(op.name, (f"p{shared[i]}",)) for i, op in enumerate(graph.ops))
    values = tuple(replace(value, batched=draw(st.booleans())) for value in graph.values)
    parameters = tuple(
        replace(
            weight,
            nbytes=weight.nbytes * 10,
            trainable=draw(st.booleans()),
            table=LookupTable(1, 1) if weight.nbytes % 2 else None,
        )
        for weight in graph.parameters
    )
    free = OpCost((0.0,) * 4, (0.0,) * 4, 0)
    few = st.integers(0, 4)
    costs = tuple(
        free
        if draw(st.booleans()) and i % 2
        else replace(c, working_bytes=draw(few), kept_fixed_bytes=draw(few))
        for i, c in enumerate(profile.costs)
    )
    made = OpGraph(ops, values, parameters, name="drawn")
    return replace(profile, graph=made, costs=costs)


def row(count: int, kept: int) -> Profile:
    """Operators in a row, 1 s forward and 2 s backward; a byte between two, none of parameters."""
    graph = OpGraph(
        tuple(Op(f"op{i}") for i in range(count)),
        tuple(Value(i, (i + 1,), 1, grad=False) for i in range(count - 1)),
    )
    return Profile(graph, (1,), (OpCost((1.0,), (2.0,), kept),) * count, "cpu", "measured", True)
