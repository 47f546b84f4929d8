"""Age of the weights that a stage reads, and the number of versions that it holds.

Both are counted in updates of the stage, once the pipeline is full. On three stages in a row, one
micro-batch per mini-batch::

    stage   version difference    stash reads    pipeoptim reads          stash holds
      0                 2         -2     -2      -2, 2 ahead     0             3
      1                 1         -1     -1      -1, 1 ahead     0             2
      2                 0          0      0       0              0             1

The schedule decides the version difference, the policy the rest. A branch of a stage graph is
shallower than the chain of all stages, and so less stale.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from anabranch.schedule.asynchronous import AsynchronousOrder
from anabranch.weights import Unit, WeightPolicy, versions_held
from anabranch.weights.requirements import require_fits


@dataclass(frozen=True, slots=True)
class Staleness:
    """Weights of one stage under a policy, in updates.

    Attributes:
        difference: the version difference, updates of the stage between the forward and the
            backward of a mini-batch.
        forward_delay: updates between the version that the forward of a mini-batch reads and the
            version that a synchronous step would read.
        forward_ahead: updates by which the policy predicts that version ahead.
        backward_delay, backward_ahead: the same for its backward.
        versions: most versions of the weights that the stage holds at once.
    """

    difference: int
    forward_delay: int
    forward_ahead: int
    backward_delay: int
    backward_ahead: int
    versions: int


def staleness(
    order: AsynchronousOrder, policy: WeightPolicy, *, last_update: bool = False
) -> tuple[Staleness, ...]:
    """Return the staleness of each stage.

    Args:
        last_update: whether predictions need the last update, which is then held as one more copy;
            for optimizers without a rule of their own.

    Raises:
        PolicyError: if the policy is not defined for such a plan.
    """
    graph, microbatches = order.graph, order.per_update
    require_fits(policy, graph, microbatches=microbatches, round_robin=order.round_robin)
    assert isinstance(policy, Hashable), "policies are frozen dataclasses"
    result = []
    for s, stage in enumerate(graph.stages):
        deepest = order.deepest(s)
        unit = Unit(8 * deepest, 0, order.in_flight[s], deepest)
        forward, backward = policy.forward(unit), policy.backward(unit)
        versions = versions_held(
            policy,
            in_flight=stage.in_flight,
            deepest=deepest,
            microbatches=microbatches,
            last_update=last_update,
        )
        result.append(
            Staleness(
                unit.lag,
                unit.number - forward.version,
                forward.ahead,
                unit.number - backward.version,
                backward.ahead,
                versions,
            )
        )
    return tuple(result)


def versions_of(
    order: AsynchronousOrder, policy: WeightPolicy, *, last_update: bool = False
) -> tuple[int, ...]:
    """Return the most weight versions that each stage holds at once; see ``staleness``."""
    return tuple(stage.versions for stage in staleness(order, policy, last_update=last_update))
