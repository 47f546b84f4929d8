"""The papers' models by hand: their operators, sizes and branches, timed by a simple roofline."""

from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.profile.profile import OpCost, Profile

SAMPLES = tuple(1 << i for i in range(16))
FLOPS = 11e12
LAUNCH_S = 15e-6


class Model:
    """Collects operators; ``add`` returns the index of the new one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[Op] = []
        self.parameters: list[Parameter] = []
        self.costs: list[OpCost] = []
        self.makes: list[int] = []
        self.reads: list[tuple[int, ...]] = []

    def add(
        self, name: str, reads: tuple[int, ...], *, flops: float, weights: int, out: int
    ) -> int:
        """One operator: floating point operations and output elements per sample, and weights."""
        parameters = ()
        if weights:
            parameters = (f"{name}.weight",)
            self.parameters.append(Parameter(f"{name}.weight", 4 * weights))
        self.ops.append(Op(name, parameters))
        # A small product does not fill the device: half of the peak at 2e8 operations per launch.
        forward = tuple(LAUNCH_S + (flops * n + 2e8) / FLOPS for n in SAMPLES)
        self.costs.append(OpCost(forward, tuple(2 * t for t in forward), 4 * out))
        self.makes.append(out)
        self.reads.append(reads)
        return len(self.ops) - 1

    def profile(self) -> Profile:
        """The finished model with its costs."""
        consumers: dict[int, list[int]] = {i: [] for i in range(len(self.ops))}
        for i, reads in enumerate(self.reads):
            for source in reads:
                if source != BATCH:
                    consumers[source].append(i)
        values = tuple(
            Value(i, tuple(readers), 4 * self.makes[i])
            for i, readers in consumers.items()
            if readers
        )
        graph = OpGraph(tuple(self.ops), values, tuple(self.parameters), name=self.name)
        return Profile(graph, SAMPLES, tuple(self.costs), device="v100", source="estimated")


def mmt(
    branches: int = 4, layers: int = 8, hidden: int = 1024, length: int = 256, parts: int = 5
) -> Profile:
    """Multi-modal transformer; a layer is 1 operator, or ``parts`` of them."""
    model = Model("mmt")
    weights = {1: (12,), 2: (4, 8), 3: (4, 4, 4), 5: (3, 1, 0, 4, 4), 6: (3, 0, 1, 0, 4, 4)}[parts]
    ends = []
    for b in range(branches):
        last = BATCH
        for i in range(layers):
            for k, share in enumerate(weights):
                count = share * hidden * hidden
                flops = 2 * count * length + 4e6 * length * (share == 0)
                last = model.add(
                    f"branch{b}.{i}.{k}", (last,), flops=flops, weights=count, out=length * hidden
                )
        ends.append(last)
    width = branches * hidden
    join = model.add("concat", tuple(ends), flops=0, weights=0, out=length * width)
    head = model.add(
        "head", (join,), flops=2 * width * hidden * length, weights=width * hidden, out=hidden
    )
    model.add("loss", (head,), flops=hidden, weights=0, out=1)
    return model.profile()


def towers(
    name: str, dense: int, sparse: int, layers: int = 4, width: int = 4096, top: int = 4
) -> Profile:
    """Branches of feed-forward layers, and of an embedding table each, that meet in a head."""
    model = Model(name)
    ends = []
    for b in range(dense):
        last = BATCH
        for i in range(layers):
            last = _linear(model, f"dense{b}.{i}", last, width, width)
        ends.append((last, width))
    for b in range(sparse):
        table = model.add(
            f"sparse{b}", (BATCH,), flops=6400 * 200, weights=64 * 1_000_000, out=6400
        )
        ends.append((table, 6400))
    total = sum(size for _, size in ends)
    last = model.add("concat", tuple(op for op, _ in ends), flops=0, weights=0, out=total)
    for i in range(top):
        last = _linear(model, f"top{i}", last, total if i == 0 else width, width)
    model.add("loss", (last,), flops=width, weights=0, out=1)
    return model.profile()


def _linear(model: Model, name: str, source: int, inside: int, outside: int) -> int:
    return model.add(
        name, (source,), flops=2 * inside * outside, weights=inside * outside, out=outside
    )


def dlrm() -> Profile:
    """7 dense branches of 4 layers, 7 tables, and 4 layers after the interaction."""
    return towers("dlrm", 7, 7)


def candle_uno() -> Profile:
    """7 branches of 4 layers."""
    return towers("candle-uno", 7, 0, top=1)
