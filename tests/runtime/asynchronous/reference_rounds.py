"""Replicas that take mini-batches in turn, as plain loops: the oracle for rounds.

Like ``reference``, whose stages it trains. All replicas of a stage have the same weights at the
same version, so there is one copy here; what a replica has of its own is the order of its passes.
Gradients of a round are kept apart until all are there, added in the order of the replicas and
divided by their number.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tests.runtime.asynchronous.reference import RefStage, Run, predicted


def longest_ways(stages: Sequence[RefStage], replicas: Sequence[int]) -> list[int]:
    """Per stage, replicas on the way to the last stage that has most of them."""
    result = list(replicas)
    for y in reversed(range(len(stages))):
        for x in stages[y].inputs:
            if isinstance(x, int):
                result[x] = max(result[x], result[y] + replicas[x])
    return result


def in_flight(stages: Sequence[RefStage], replicas: Sequence[int]) -> list[int]:
    """Per stage, mini-batches of one replica between forward and backward."""
    ways = longest_ways(stages, replicas)
    return [(m + r - 1) // r for m, r in zip(ways, replicas, strict=True)]


def train_in_turns(
    stages: Sequence[RefStage],
    replicas: Sequence[int],
    policy: str,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    fills: Sequence[int] = (0,),
) -> list[float]:
    """Train over a stream of mini-batches, which the replicas of each stage take in turn.

    Args:
        stages: in topological order, the last one makes the loss.
        replicas: per stage.
        policy: one that needs no common version of all stages.
        batches: named tensors.
        fills: mini-batches before which the pipeline is drained, the first one included.

    Returns:
        The loss of every mini-batch.
    """
    for stage in stages:
        stage.versions = [[w.detach().clone() for w in stage.weights]]
    losses: list[float] = []
    for full, end in zip(fills, [*fills[1:], len(batches)], strict=True):
        losses += _Fill(stages, replicas, policy, batches[full:end]).execute()
    return losses


class _Fill(Run):
    """From one fill to its drain; mini-batches, rounds and versions count from the fill."""

    def __init__(
        self,
        stages: Sequence[RefStage],
        replicas: Sequence[int],
        policy: str,
        batches: Sequence[Mapping[str, Tensor]],
    ) -> None:
        super().__init__(stages, policy, batches, 0, len(batches), 1, None)
        self.replicas = replicas
        self.held = in_flight(stages, replicas)
        held = [w * r for w, r in zip(self.held, replicas, strict=True)]
        self.halves = [(max(held) - m) // r // 2 for m, r in zip(held, replicas, strict=True)]
        self.first = [len(stage.versions) - 1 for stage in stages]
        self.rounds = [0] * len(stages)
        self.own: dict[tuple[int, int], list[Tensor | None]] = {}

    def execute(self) -> list[float]:
        """Every replica: forwards as long as it may hold another mini-batch, then a backward."""
        total, stages = len(self.batches), self.stages
        everyone = [(s, r) for s in range(len(stages)) for r in range(self.replicas[s])]
        forwards, backwards = dict.fromkeys(everyone, 0), dict.fromkeys(everyone, 0)
        ahead, back = set[tuple[int, int]](), set[tuple[int, int]]()
        while len(back) < total * len(stages):
            before = len(ahead) + len(back)
            for s, r in everyone:
                mine = range(r, total, self.replicas[s])
                f, b = forwards[s, r], backwards[s, r]
                sources = [x for x in stages[s].inputs if isinstance(x, int)]
                users = [y for y, other in enumerate(stages) if s in other.inputs]
                if f < len(mine) and f - b < self.held[s]:
                    oldest = f - self.held[s] + 1
                    if self.rounds[s] >= oldest and all((x, mine[f]) in ahead for x in sources):
                        self.forward(s, mine[f])
                        ahead.add((s, mine[f]))
                        forwards[s, r] += 1
                elif (
                    b < len(mine)
                    and self.rounds[s] == b
                    and all((y, mine[b]) in back for y in users)
                ):
                    self.backward(s, mine[b])
                    back.add((s, mine[b]))
                    backwards[s, r] += 1
            assert len(ahead) + len(back) > before, "stages wait for each other"
        return self.losses

    def weights_for(self, s: int, n: int) -> tuple[list[Tensor], list[Tensor] | str]:
        stage, u = self.stages[s], n // self.replicas[s]
        v = max(0, u - (self.held[s] - 1))
        assert v == self.rounds[s], "a forward comes at the version that its policy takes it to"
        current = stage.versions[self.first[s] + v]
        if self.policy == "naive":
            return current, "current"
        if self.policy == "stash":
            return current, current
        if self.policy == "spectrain":
            return predicted(stage, u - v + self.halves[s]), "predicted"
        ahead = predicted(stage, u - v)
        if self.policy == "pipeoptim":
            return ahead, "current"
        assert self.policy == "predict-stash"
        return ahead, ahead

    def end_pass(self, s: int, n: int) -> None:
        stage = self.stages[s]
        self.own[s, n] = [p.grad for p in stage.weights]
        for p in stage.weights:
            p.grad = None
        count = self.replicas[s]
        start = n // count * count
        of_round = range(start, min(start + count, len(self.batches)))
        if all((s, m) in self.own for m in of_round):
            self.update_round(s, [self.own.pop((s, m)) for m in of_round])

    def update_round(self, s: int, grads: Sequence[Sequence[Tensor | None]]) -> None:
        stage = self.stages[s]
        for p, each in zip(stage.weights, zip(*grads, strict=True), strict=True):
            there = [g for g in each if g is not None]
            if there:
                total = there[0]
                for g in there[1:]:
                    total = total + g
                p.grad = total / len(grads)
        self.update(s, len(grads))
        self.rounds[s] += 1
