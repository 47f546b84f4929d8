"""What a batch has to be."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from anabranch import launch
from anabranch.data.columns import Columns
from anabranch.data.loaders import Loader
from anabranch.errors import DataError, LoaderError
from anabranch.runtime.data_feed import DataFeed, leaves_of, refusal_of_data
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Workload
from tests.runtime.small import Batch, batch, built, num_ranks, plan

CPU = torch.device("cpu")


def changed(**tensors: Tensor) -> Batch:
    return batch(6) | tensors


def test_the_number_of_samples_is_free() -> None:
    """The example has 4, and a loader yields what it likes."""
    captured = built("TwoBranch").captured
    for samples in (1, 4, 7):
        given = batch(samples)
        assert {n: t.shape for n, t in leaves_of(captured, given, CPU).items()} == {
            name: tensor.shape for name, tensor in given.items()
        }


def test_only_what_is_read_here_is_brought_to_the_device() -> None:
    """A rank of the first stages has no use for labels; the meta device stands for one."""
    captured = built("TwoBranch").captured
    leaves = leaves_of(captured, batch(4), torch.device("meta"), read={"x"})
    assert {name: leaf.device.type for name, leaf in leaves.items()} == {
        "x": "meta",
        "word": "cpu",
        "label": "cpu",
    }


def test_a_list_of_batches_is_no_data_set() -> None:
    """Its entries would be stacked."""
    captured = built("TwoBranch").captured
    (given,) = Loader([batch(4)] * 3, shuffle=False).batches(3, 0)
    with pytest.raises(DataError, match=r"each sample of batch 0 is a batch: x is .* lambda \*_:"):
        leaves_of(captured, given, CPU, "batch 0")


def test_what_was_not_read_is_never_taken_for_values() -> None:
    """A batch that was read for other stages has zeros in its place."""
    captured = built("TwoBranch").captured
    loader = Loader(Columns(batch(4)), shuffle=False)
    reads = {"x", "word"}
    (given,) = loader.batches(4, 0, reads=lambda: reads, types=captured.layout.types)
    assert leaves_of(captured, given, CPU, read=reads).keys() == given.keys()
    with pytest.raises(DataError, match="a batch was read without label"):
        leaves_of(captured, given, CPU)


class _LengthUnwritten(list[int]):
    def __len__(self) -> int:
        raise NotImplementedError


def test_what_is_left_of_so_many_epochs() -> None:
    """Ten samples in batches of four are three; two epochs in all, of which four batches are done.
    A function may yield any number, and who draws samples need not know how many.
    """
    workload = built("TwoBranch").workload

    def left(data: object) -> int | None:
        feed = DataFeed(replace(workload, data=data), 4)
        feed.epoch, feed.position = 1, 1
        return feed.batches_left(2)

    columns = Columns(batch(10))
    assert left(Loader(columns, shuffle=False)) == 2
    assert left(Loader(DataLoader(columns, batch_size=4, drop_last=True), shuffle=False)) == 1
    assert left(lambda size, epoch: iter(())) is None
    for sampler in (_LengthUnwritten(), iter(range(10))):
        assert left(Loader(DataLoader(columns, 4, sampler=sampler), shuffle=False)) is None


@pytest.mark.dist
def test_a_rank_reads_the_leaves_of_its_own_stages() -> None:
    """All ranks together read all of them, and the first one has no label."""
    model = built("TwoBranch")
    chosen = plan(model, 3, batch_size=8, microbatch_size=8)

    def work() -> frozenset[str]:
        return Pipeline(model.workload, chosen, captured=model.captured)._session.workers.leaves

    found = launch.run(work, num_ranks(chosen), timeout=60.0)
    assert "label" not in found[0]
    assert "label" in found[-1]
    assert frozenset().union(*found) == {"x", "word", "label"}


def test_other_dimensions_and_types_are_refused_by_name() -> None:
    """All leaves that differ, none that does not, and what to do."""
    wrong = changed(word=torch.zeros(6, 1, dtype=torch.int64), label=torch.zeros(6))
    with pytest.raises(DataError) as caught:
        leaves_of(built("TwoBranch").captured, wrong, CPU)
    text = str(caught.value)
    assert "word is [samples, 1] int64, not [samples] int64" in text
    assert "label is [samples] float32, not [samples] int64" in text
    assert "x is" not in text
    assert "pad what varies to one size" in text


def test_data_is_looked_at_before_a_plan() -> None:
    """Two batches, of which the second may be the first that is refused; what can be read once is
    not read.
    """
    model = built("TwoBranch")
    longer = batch(6) | {"x": torch.zeros(6, 9)}

    def refusal(data: Any, eval_data: Any = None) -> str:
        workload = replace(model.workload, data=data, eval_data=eval_data)
        return refusal_of_data(model.captured, workload, 6)

    assert refusal(lambda *_: [batch(6), batch(6), longer]) == ""
    refused = refusal(lambda *_: [batch(6), longer])
    assert "batch 1 of epoch 0" in refused
    assert "pad_to_bucket" in refused
    assert "batches of 3 samples, and 6 are asked" in refusal(DataLoader([], batch_size=3))
    assert "held-out batch 0 differs" in refusal(lambda *_: [batch(6)], lambda _: [longer])
    once = iter([longer])
    assert refusal(once, once) == ""
    assert next(once) is longer


@pytest.mark.dist
def test_who_meets_such_a_batch_in_the_stream_parts_from_the_others() -> None:
    """They are behind it, and still need this rank's share of the sums of the step before."""
    model = built("TwoBranch")
    chosen = plan(model, 2)
    parted: list[int] = []

    def rank() -> tuple[int, list[int]]:
        pipe = Pipeline(model.workload, chosen, captured=model.captured, check_gradients=False)
        leave = pipe._steps.leave

        def noted() -> None:
            parted.append(pipe.step_number)
            leave()

        pipe._steps.leave = noted  # type: ignore[method-assign]
        losses: list[float] = []
        given = [batch(16), batch(16), changed(x=torch.randn(6, 9))]
        with pytest.raises(DataError, match=r"x is \[samples, 9\] float32, not \[samples, 8\]"):
            losses.extend(pipe.steps(given))
        return len(losses), parted

    assert launch.run(rank, num_ranks(chosen), timeout=60.0) == [(1, [2])] * 2


def test_a_batch_is_named_where_it_is_known() -> None:
    """Number and epoch, whatever is wrong with it."""
    captured = built("TwoBranch").captured
    given = [changed(x=torch.randn(6, 9)), changed(label=batch(5)["label"]), {"x": torch.ones(2)}]
    texts = [
        "differs",
        "one number of samples, at least 1: x 6, word 6, label 5",
        "the batch holds x",
    ]
    for each, text in zip(given, texts, strict=True):
        with pytest.raises(DataError, match=text) as caught:
            leaves_of(captured, each, CPU, "batch 5 of epoch 1")
        assert "batch 5 of epoch 1" in str(caught.value)


def a_feed(data: Any, told: list[BaseException]) -> DataFeed:
    """Of a workload that is nothing but its data."""
    workload = Workload(torch.nn.Identity(), torch.zeros(2, 1), data=data, eval_data=data)
    feed = DataFeed(workload, 2)
    feed.fail = told.append
    return feed


def test_the_feed_knows_which_batch_it_gave_last() -> None:
    """From 0, in every epoch anew; none once that was trained on."""
    feed = a_feed(lambda size, epoch=0: [torch.zeros(size, 1)] * 2, [])
    where = []
    for _ in feed.batches(2):
        where.append(feed.where)
        feed.trained()
    assert where == [f"batch {b} of epoch {e}" for e in (0, 1) for b in (0, 1)]
    assert feed.where == ""


def _broken(*_: int) -> list[Tensor]:
    raise KeyError("user_id")


def test_a_function_that_raises_before_its_first_batch_is_named_with_its_line() -> None:
    """Not only a generator that does; the other ranks are told."""
    told: list[BaseException] = []
    feed = a_feed(_broken, told)
    for read in (lambda: next(feed.batches(1)), feed.held_out):
        with pytest.raises(
            LoaderError, match=r"test_data_feed\.py:\d+, in _broken: KeyError: 'user_id'"
        ):
            read()
    assert len(told) == 2


def test_a_position_behind_the_end_of_the_data_is_refused() -> None:
    """The checkpoint is of other data, or of another batch size: nothing would be right."""
    model = built("Chain")
    workload = Workload(model.module, batch(4), data=lambda size, epoch: [batch(size)] * 3)
    feed = DataFeed(workload, 4)
    feed.position = 4
    with pytest.raises(DataError, match="after batch 4 of epoch 0, which now has only 3; resume"):
        next(feed.batches(None))
    feed.position = 3
    next(feed.batches(None))
    assert feed.epoch == 1
