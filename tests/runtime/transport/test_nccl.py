"""Messages through NCCL, without NCCL: buffers, edges without a communicator, pairs.

``test_gpu`` has the messages themselves, ``tests/gpu_model`` the order in which GPUs get them.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.errors import TrainingError
from anabranch.runtime.transport import NcclTransport
from anabranch.runtime.transport.handshake import Handshake
from anabranch.runtime.transport.nccl import Buffers
from anabranch.runtime.transport.notices import Notice
from tests.runtime.transport.local import Hub, LocalTransport

CPU = torch.device("cpu")
SPECS = [(torch.Size([4]), torch.float32), (torch.Size([0, 2]), torch.float32)]


class Letters:
    """Notices between threads."""

    def __init__(self, boxes: dict[int, list[Notice]], changed: threading.Condition) -> None:
        self._boxes, self._changed = boxes, changed
        self.rank = -1

    def tell(self, rank: int, notice: Notice) -> None:
        with self._changed:
            self._boxes[rank].append(notice)
            self._changed.notify_all()

    def heard(self, wait_s: float = 0.0, ranks: Collection[int] = ()) -> list[Notice]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._boxes[self.rank]), wait_s)
            notices, self._boxes[self.rank] = self._boxes[self.rank], []
            return notices


class CopyingWire:
    """A ``GpuWire`` on which sends leave copies, which receives find by their number."""

    def __init__(
        self, copies: dict[Any, list[Tensor]], changed: threading.Condition, rank: int
    ) -> None:
        self._copies, self._changed, self._rank = copies, changed, rank
        self._received: Counter[Any] = Counter()

    def start(self, pair: Any, tensors: Sequence[Tensor], after: Any) -> list[Any]:
        (tensor,) = tensors
        if pair[0] == self._rank:
            with self._changed:
                self._copies[pair].append(tensor.clone())
                self._changed.notify_all()
            return []
        number = self._received[pair]
        self._received[pair] += 1
        return [(pair, number, tensor)]

    def join(self, works: Sequence[Any]) -> None:
        for pair, number, tensor in works:
            with self._changed:
                assert self._changed.wait_for(
                    lambda p=pair, n=number: len(self._copies[p]) > n, 10.0
                )
                tensor.copy_(self._copies[pair][number])

    def fence(self) -> int:
        return 0


def ends(pairs: Sequence[tuple[int, int]]) -> list[NcclTransport]:
    """Both ends of two ranks."""
    boxes: dict[int, list[Notice]] = {0: [], 1: []}
    changed, hub = threading.Condition(), Hub(timeout=10.0)
    copies: defaultdict[Any, list[Tensor]] = defaultdict(list)
    made = []
    for rank in range(2):
        letters = Letters(boxes, changed)
        letters.rank = rank
        handshake = Handshake(rank, letters, 10.0)
        wire = CopyingWire(copies, changed, rank)
        otherwise = LocalTransport(hub, rank)
        made.append(NcclTransport(rank, pairs, wire, CPU, 10.0, handshake, otherwise))
    return made


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 0)], []])
def test_messages_arrive_in_both_directions(pairs: list[tuple[int, int]]) -> None:
    """Also where two ranks have no communicator, along an edge that only an evaluation has."""
    got: dict[int, list[list[float]]] = {0: [], 1: []}

    def rank(number: int, end: NcclTransport) -> None:
        empty = torch.empty(0, 2)
        receipts = [end.receive(SPECS, CPU, 1 - number, tag) for tag in (1, 0)]
        for tag in (0, 1):
            end.send([torch.full((4,), float(10 * number + tag)), empty], 1 - number, tag)
        for receipt in receipts:
            first, second = receipt.wait()
            assert second.shape == (0, 2)
            got[number].append(first.tolist())
        end.settle()

    threads = [threading.Thread(target=rank, args=each) for each in enumerate(ends(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {0: [[11.0] * 4, [10.0] * 4], 1: [[1.0] * 4, [0.0] * 4]}


def test_a_rank_that_hears_nothing_gives_up() -> None:
    """After the timeout of a silent rank."""
    one, _ = ends([(0, 1), (1, 0)])
    one._handshake._timeout = 0.05
    receipt = one.receive(SPECS, CPU, 1, 0)
    with pytest.raises(TrainingError, match=r"rank 1 did not go on for 0\.05 s"):
        receipt.wait()


class TestBuffers:
    """Memory of received messages."""

    def test_there_are_as_many_as_are_held_at_once(self) -> None:
        """A tensor that autograd has saved is held, also when nobody has a name for it."""
        buffers = Buffers(CPU, lambda: 0)
        weight = torch.ones(4, requires_grad=True)
        graphs = []
        for step in range(6):
            buffers.sweep()
            tensor, _ = buffers.take("channel", SPECS[0])
            graphs.append((weight * tensor.fill_(step)).sum())
            del tensor
            if len(graphs) > 2:
                graphs.pop(0).backward()
        assert buffers.nbytes == 3 * 16
        assert weight.grad is not None
        assert weight.grad.tolist() == [0.0 + 1 + 2 + 3] * 4

    def test_one_is_filled_again_behind_its_last_readers(self) -> None:
        """The fence is the position of the compute stream when nobody held the tensor any more."""
        positions = iter(range(100))
        buffers = Buffers(CPU, lambda: next(positions))
        tensor, made = buffers.take("channel", SPECS[0])
        assert made == 0  # its memory may have been another tensor's
        del tensor
        next(positions)
        buffers.sweep()
        buffers.sweep()
        assert buffers.take("channel", SPECS[0])[1] == 2

    def test_short_messages_lie_in_long_buffers(self) -> None:
        """Of a short last batch, which makes no other buffers; a longer message does."""
        buffers = Buffers(CPU, lambda: 0)
        for size in (4, 2, 0, 8, 3):
            tensor, _ = buffers.take("channel", (torch.Size([size]), torch.float32))
            assert tensor.shape == (size,)
            del tensor
            buffers.sweep()
        assert buffers.nbytes == 16 + 32

    def test_no_memory_is_an_error_with_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not a wait for other ranks, and not torch's own text."""
        buffers = Buffers(CPU, lambda: 0)
        kept = buffers.take("channel", SPECS[0])

        def refuse(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.raises(TrainingError, match=r"no memory for 16 bytes .* 1 buffers of 16 bytes"):
            buffers.take("channel", SPECS[0])
        assert kept
