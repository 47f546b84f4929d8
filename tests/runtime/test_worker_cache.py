"""Workers for batches of other sizes than the plan's."""

import pytest

from tests.runtime.small import batch, built, plan, train_alone, with_options
from tests.runtime.training import equal, sgd, train

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-deep"])
def test_a_batch_may_be_larger_than_the_plans(schedule: str) -> None:
    """The plan's in-flight counts were made for fewer micro-batches."""
    model = built("Chain")
    workload = with_options(model, optimizer=sgd)
    chosen = plan(model, 2, batch_size=8, schedule=schedule)
    ours = train(model, chosen, workload, [batch(24)], exact=True)
    assert equal(ours, train_alone(workload, [batch(24)]))
