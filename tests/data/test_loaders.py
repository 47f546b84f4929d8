"""Batches of DataLoaders and data sets."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from anabranch import launch
from anabranch.data.columns import Columns
from anabranch.data.loaders import Loader, is_unread, loader_of, samples_digest
from anabranch.errors import DataError

NUMBERS = torch.arange(10)


class Augmented(Dataset[Tensor]):
    """Numbers with noise of all three kinds, whose samples are counted."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return index + torch.rand(1) + np.random.rand() + random.random()


class Stream(IterableDataset[Tensor]):
    """Numbers that cannot be had but one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from NUMBERS


class Counting:
    """A loader that tells its position, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        start, self.at = self.at, 0
        for number in range(start, 5):
            self.read, self.at = self.read + 1, number + 1
            yield torch.tensor([number])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * 10, 10)


SOURCES: dict[str, Any] = {
    "data set": Augmented,
    "shuffled": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(
        Augmented(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "sampler": lambda: DataLoader(Augmented(), batch_size=4, sampler=weighted()),
    "nested": lambda: DataLoader(
        Augmented(),
        batch_sampler=BatchSampler(
            RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(3)), 4, drop_last=False
        ),
    ),
    "workers": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1),
    "stream": Stream,
    "stream loader": lambda: DataLoader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("name", SOURCES)
def test_all_ranks_read_the_same_from_any_position(name: str):
    """Ranks build the loader for themselves, with other random states; the third batch of the
    second epoch is the same whether the two before were read or not, and outside nothing is drawn.
    """

    def rank(number: int, start: int) -> list[Tensor]:
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        loader = loader_of(SOURCES[name](), shuffle=True)
        before = torch.get_rng_state()
        found = list(loader.batches(4, 1, start=start, seed=9))
        assert torch.equal(torch.get_rng_state(), before)
        return found

    whole = rank(0, 0)
    assert [len(found) for found in whole] == [4, 4, 2]
    for number in (1, 2):
        assert torch.equal(torch.cat(rank(number, 0)), torch.cat(whole))
        assert torch.equal(torch.cat(rank(number, 2)), whole[2])


@pytest.mark.dist
def test_a_rank_has_persistent_workers_of_its_own():
    """Where the example of the workload was read from the same DataLoader, before the fork."""
    source = DataLoader(TensorDataset(NUMBERS), 4, num_workers=1, persistent_workers=True)
    loader = loader_of(source, shuffle=True)
    first = next(iter(source))[0]
    ranks = launch.run(lambda: [batch[0].tolist() for batch in loader(4)], 2, timeout=60.0)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == first.tolist()
    assert [batch[0].tolist() for batch in source] == ranks[0]


@pytest.mark.parametrize("name", ["data set", "shuffled", "generator", "sampler", "nested"])
def test_epochs_have_orders_of_their_own(name: str):
    """And a run with another seed too, unless the user's generator decides."""
    loader = loader_of(SOURCES[name](), shuffle=True)

    def order(epoch: int, seed: int) -> list[int]:
        return torch.cat(list(loader.batches(4, epoch, seed=seed))).int().flatten().tolist()

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1)
    if name not in ("generator", "nested"):
        assert order(0, 1) != order(0, 2)


def test_what_was_passed_over_is_not_read():
    """With an index; held-out data is read in order."""
    data = Augmented()
    list(loader_of(DataLoader(data, batch_size=4), shuffle=True).batches(4, 0, start=2))
    assert data.read == [8, 9]
    data.read.clear()
    list(loader_of(data, shuffle=False)(4))
    assert data.read == list(range(10))


def test_a_loader_goes_on_by_its_state():
    """Without reading what was before; without a state it is read up to the position."""
    for state, read in (({"at": 3}, 2), (None, 5)):
        source = Counting()
        loader = loader_of(source, shuffle=True)
        assert loader.has_state
        found = [int(b) for b in loader.batches(1, 0, start=3, state=state)]
        assert (found, source.read) == ([3, 4], read)


def test_a_stream_of_samples_goes_on_by_its_state():
    """As those of Hugging Face do, of whose samples batches are made here."""

    class Told(Stream):
        start = 0

        def __iter__(self) -> Iterator[Tensor]:
            yield from NUMBERS[self.start :]

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.start = state["at"]

    found = loader_of(Told(), shuffle=True).batches(4, 0, start=1, state={"at": 4})
    assert [b.tolist() for b in found] == [[4, 5, 6, 7], [8, 9]]


def test_a_position_that_the_data_does_not_have():
    for source in (Augmented(), Counting()):
        with pytest.raises(DataError, match=r"after batch 7 of epoch 2, which now has only [35]"):
            list(loader_of(source, shuffle=True).batches(4, 2, start=7))


def test_epochs_are_told():
    """As samplers of several processes want it, also one that refers to itself."""

    class Sampler:
        sampler = property(lambda self: self)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch])

    nested = BatchSampler(Sampler(), 1, drop_last=False)
    for source in (DataLoader(NUMBERS, 1, sampler=Sampler()), DataLoader(NUMBERS, 1, None, nested)):
        loader = loader_of(source, shuffle=True)
        assert [int(b) for epoch in (4, 7) for b in loader.batches(1, epoch)] == [4, 7]


def test_data_that_makes_no_sense_is_refused():
    """A sampler that gives every rank other samples, another batch size, a number, a function of
    other arguments, which would fail after training.
    """
    split = DistributedSampler(TensorDataset(NUMBERS), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="DistributedSampler for 2 replicas"):
        loader_of(DataLoader(TensorDataset(NUMBERS), batch_size=4, sampler=split), shuffle=True)
    with pytest.raises(DataError, match=r"batches of 4 .* or a plan for it"):
        loader_of(DataLoader(TensorDataset(NUMBERS), batch_size=4), shuffle=True)(8, 0)
    with pytest.raises(TypeError, match="is a int"):
        loader_of(3, shuffle=True)
    with pytest.raises(TypeError, match=r"its batches once; .* eval_data\(batch_size\) that"):
        loader_of((row for row in NUMBERS), shuffle=False)

    def function(batch_size: int, epoch: int) -> list[Tensor]:
        return []

    assert loader_of(function, shuffle=True) is function
    with pytest.raises(TypeError, match=r"function cannot .* eval_data\(batch_size\): .*'epoch'"):
        loader_of(function, shuffle=False)
    assert loader_of(None, shuffle=True) is None


class Reads:
    """A column that counts its samples."""

    def __init__(self, width: int) -> None:
        self.width, self.read = width, 0

    def __call__(self, samples: Tensor) -> Tensor:
        self.read += len(samples)
        return samples[:, None].expand(len(samples), self.width) * 1.0


TYPES = {"pixels": ((3,), torch.float32), "label": ((), torch.int64)}


@pytest.mark.parametrize("in_loader", [False, True])
def test_columns_that_are_not_needed_are_not_read(in_loader: bool):
    """They are zeros without memory, in the order of the example; a digest tells the samples,
    whichever columns a rank has.
    """
    pixels = Reads(3)
    data: Any = Columns({"label": NUMBERS, "pixels": pixels})
    loader = loader_of(DataLoader(data, batch_size=4) if in_loader else data, shuffle=False)
    wanted: list[Any] = [None, {"label"}, set()]
    first, second, third = loader.batches(4, 0, reads=lambda: wanted.pop(0), types=TYPES)
    assert pixels.read == 4
    assert list(first) == list(second) == list(third) == ["pixels", "label"]
    assert first["pixels"][:, 0].tolist() == [0, 1, 2, 3]
    assert second["label"].tolist() == [4, 5, 6, 7]
    assert second["pixels"].shape == (4, 3)
    assert second["pixels"].untyped_storage().nbytes() == 4
    assert (third["pixels"].shape, third["label"].dtype) == ((2, 3), torch.int64)
    again = next(loader.batches(4, 0, reads=lambda: {"pixels"}, types=TYPES))
    assert [is_unread(tensor) for tensor in again.values()] == [False, True]
    assert not is_unread(torch.zeros(1))
    same = {samples_digest(t) for t in (*first.values(), *again.values())}
    assert len(same) == 1
    assert None not in same
    assert samples_digest(second["label"]) not in same


def test_what_a_column_draws_is_the_same_for_all_who_read_it():
    """Whichever other columns they read; and another batch has other numbers."""
    noise = {name: lambda samples: torch.rand(len(samples)) for name in ("a", "b")}
    types = dict.fromkeys(noise, ((), torch.float32))

    def read(*names: str) -> list[Tensor]:
        loader = loader_of(Columns(noise, length=8), shuffle=False)
        return [b["b"] for b in loader.batches(4, 0, reads=lambda: names, types=types)]

    alone, both = read("b"), read("a", "b")
    assert all(torch.equal(x, y) for x, y in zip(alone, both, strict=True))
    assert not torch.equal(*alone)
    found = Columns(noise, length=8).gather([1, 2])
    assert not torch.equal(found["a"], found["b"])


def test_a_data_set_with_a_transform_is_read_whole():
    """Of Hugging Face: the function that makes its samples may want any column."""

    class Transformed(Columns):
        format: ClassVar = {"type": "custom"}

    pixels = Reads(3)
    data = Transformed({"label": NUMBERS, "pixels": pixels})
    next(loader_of(data, shuffle=False).batches(4, 0, reads=lambda: {"label"}, types=TYPES))
    assert pixels.read == 4


def test_columns_of_a_batch_of_another_form_are_all_read():
    """Where names are not those of the batch, or the user's function makes the batch."""
    pixels = Reads(3)
    data = Columns({"label": NUMBERS, "pixels": pixels})
    other = {"image": TYPES["pixels"], "label": TYPES["label"]}
    for loader, types in [
        (loader_of(data, shuffle=False), other),
        (loader_of(DataLoader(data, 4, collate_fn=list), shuffle=False), TYPES),
    ]:
        pixels.read = 0
        list(islice(loader.batches(4, 0, reads=lambda: {"label"}, types=types), 1))
        assert pixels.read == 4


def test_columns_are_arrays_tensors_and_functions():
    """Of one length; a sample is a mapping, so any DataLoader takes them."""
    array = np.arange(20).reshape(10, 2)
    data = Columns({"a": array, "n": NUMBERS})
    assert {k: v.tolist() for k, v in data.gather([2, 5]).items()} == {
        "a": [[4, 5], [10, 11]], "n": [2, 5],
    }  # fmt: skip
    assert {k: v.tolist() for k, v in data[3].items()} == {"a": [6, 7], "n": 3}
    assert (len(data), data.column_names) == (10, ["a", "n"])
    assert len(Columns({"f": Reads(1)}, length=7)) == 7
    with pytest.raises(ValueError, match="one length: a 10, n 3"):
        Columns({"a": array, "n": NUMBERS[:3]})
    with pytest.raises(ValueError, match="give it as length"):
        Columns({"f": Reads(1)})


def test_the_batch_size_is_the_loaders():
    assert Loader(DataLoader(NUMBERS, batch_size=4), shuffle=True).batch_size == 4
    assert Loader(NUMBERS, shuffle=True).batch_size is None


@pytest.mark.parametrize(
    ("source", "is_short", "message"),
    [
        (TensorDataset(NUMBERS), True, ""),
        (TensorDataset(NUMBERS[:0]), True, "TensorDataset has no batch of 12 samples"),
        (DataLoader(TensorDataset(NUMBERS), batch_size=12), False, ""),
        (
            DataLoader(TensorDataset(NUMBERS), batch_size=12, drop_last=True),
            False,
            "DataLoader has no batch of 12 samples; take a smaller --batch-size",
        ),
        (DataLoader(TensorDataset(NUMBERS), batch_size=5), False, "has batches of 5 samples"),
    ],
)
def test_data_without_a_batch_is_refused_and_a_short_one_is_known(source, is_short, message):
    """Before it is read: a DataLoader says how many batches it has, a data set how many samples."""
    loader = Loader(source, shuffle=False)
    assert loader.is_short_of(12) is is_short
    if not message:
        loader.require_batch_size(12)
        return
    with pytest.raises(DataError, match=message):
        loader.require_batch_size(12)
