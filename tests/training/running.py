"""Ready training loops on local ranks."""

from typing import Any

import torch.distributed as dist

from anabranch import launch
from anabranch.plans.plan import Plan
from anabranch.record import Run
from anabranch.training import Event, StepEvent, train, train_async
from anabranch.workload import Workload
from tests.runtime.small import Built, batch, num_ranks
from tests.runtime.training import LIMIT_S

SIZES = [16, 16, 16, 16, 10]


def data(batch_size: int, epoch: int) -> list[dict[str, object]]:
    """Batches of an epoch, of which the last one is short."""
    return [dict(batch(n, 10 * epoch + i)) for i, n in enumerate(SIZES)]


def runs(
    model: Built, chosen: Plan, workload: Workload, others: Any = None, **options: Any
) -> list[tuple[Run, list[Event]]]:
    """Runs by rank, without a flush where there is a policy, and what each rank told; ``others``
    are options of all ranks but the first.
    """
    options = {"check_gradients": False, "captured": model.captured} | options

    def rank() -> tuple[Run, list[Event]]:
        seen: list[Event] = []
        function: Any = train_async if "policy" in options else train
        mine = options | ((others or {}) if dist.get_rank() else {})
        return function(workload, chosen, callbacks=[seen.append], **mine), seen

    return launch.run(rank, num_ranks(chosen), timeout=LIMIT_S)


def steps_of(events: list[Event]) -> list[StepEvent]:
    """The steps among events."""
    return [event for event in events if isinstance(event, StepEvent)]
