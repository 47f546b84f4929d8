"""Copies of the state of a run in memory that outlives the processes which fill it.

The parent of local ranks opens two files in memory for each rank, and a table, before it forks
them. At an interval of some steps each rank copies its part of a checkpoint::

    rank 0    file 0  step 20    file 1  step 30                    table:  0 at 20, 30
    rank 1    file 0  step 20    file 1  (step 30, being written)           1 at 20

Step 20 is the newest of which all ranks have a copy, so it is kept until all have step 30. Any
number of ranks may die at any time: ranks that go on, under any plan, read all that they need.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anabranch.checkpoint import Progress, RankPart
from anabranch.checkpoint.reading import SavedState
from anabranch.checkpoint.writing import joined
from anabranch.errors import TrainingError
from anabranch.runtime.transport.memory import fence
from anabranch.runtime.transport.packing import ALIGNMENT, pack, packing_of, specs_of, unpack

_HEAD = struct.Struct("<qq")
"""Offset and length of the text of a copy, in bytes."""

_START = ALIGNMENT
"""Offset of the first tensor of a copy."""

_LOSS = struct.Struct("<dq")
_STEP_BITS, _RANK_BITS = 36, 16


@dataclass(frozen=True, order=True, slots=True)
class Moment:
    """Step of a copy, the attempt that made it, and the ranks of that attempt."""

    step: int
    attempt: int
    size: int

    @property
    def packed(self) -> int:
        """One integer, which is written at once."""
        return ((self.attempt << _RANK_BITS | self.size) << _STEP_BITS | self.step) + 1

    @staticmethod
    def unpacked(number: int) -> Moment | None:
        """Return the moment of an integer; None for 0, which marks a copy that is being written."""
        if number == 0:
            return None
        high, step = divmod(number - 1, 1 << _STEP_BITS)
        return Moment(step, *divmod(high, 1 << _RANK_BITS))


class SpareCopies:
    """Copies of all ranks; made by the parent of local ranks, and inherited by them, with numbers
    that all processes see.

    Attributes:
        every: steps between two copies.
        attempt: number of times that ranks have come together again; the parent counts.
        reported_steps: steps of which the first rank has called callbacks.
        reported_events: number of the last event between steps that was reported in this way.

    Raises:
        TrainingError: where the system has no files in memory.
    """

    def __init__(self, num_ranks: int, every: int) -> None:
        if sys.platform != "linux":
            raise TrainingError(
                "copies that outlive a rank are kept in files in memory, which only Linux has; "
                "train without --survive, with --save-every and --max-restarts"
            )
        self.every = every
        self._files = [
            [os.memfd_create(f"anabranch-copy-{rank}") for _ in range(2)]
            for rank in range(num_ranks)
        ]
        self._log = os.memfd_create("anabranch-losses")
        shared = mmap.mmap(-1, 8 * (2 * num_ranks + 3))
        self._table = memoryview(shared).cast("q")[3:]
        self.attempt, self.reported_steps, self.reported_events = (
            c_int64.from_buffer(shared, 8 * place) for place in range(3)
        )
        self._memory: dict[int, Tensor] = {}  # of this process, by file

    def close(self) -> None:
        """Give the memory back, once no rank is left."""
        self._memory.clear()
        for file in (self._log, *(file for pair in self._files for file in pair)):
            os.close(file)

    @property
    def is_dense(self) -> bool:
        """True if a rank of ``Pipeline.steps`` could make two copies before another one has made
        the first, unless they wait for each other.
        """
        return self.every < 3

    @property
    def newest(self) -> Moment | None:
        """The newest moment of which all ranks have a copy."""
        moments = (moment for moment in self._moments(0) if moment is not None)
        complete = (m for m in moments if all(m in self._moments(r) for r in range(m.size)))
        return max(complete, default=None)

    def _moments(self, rank: int) -> list[Moment | None]:
        return [*map(Moment.unpacked, self._table[2 * rank : 2 * rank + 2].tolist())]

    def keep(
        self, rank: int, size: int, part: RankPart, progress: Progress, further: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Copy a rank's part, over its older copy.

        Args:
            further: facts to keep with the copy, as JSON.

        Returns:
            Function to call once the step is known to be a good one; from then on the copy counts.

        Raises:
            TrainingError: if there is no memory for it.
        """
        kept = self.newest
        place = int(kept is not None and self._moments(rank)[0] == kept)
        self._table[2 * rank + place] = 0
        fence()
        tensors = [tensor.detach() for tensor in part.tensors.values()]
        packing = packing_of(specs_of(tensors))
        end = _START + packing.nbytes
        document = {
            "part": {**part.description, "tensors": part.listed},
            "progress": progress.model_dump(),
            "further": dict(further),
        }
        text = json.dumps(document).encode()
        memory = self._opened(self._files[rank][place], end + len(text))
        raw = memory.numpy().data
        pack(tensors, packing, raw[_START:], memory.data_ptr() + _START)
        raw[end : end + len(text)] = text
        _HEAD.pack_into(raw, 0, end, len(text))
        moment = Moment(progress.step, self.attempt.value, size)

        def confirm() -> None:
            fence()
            self._table[2 * rank + place] = moment.packed

        return confirm

    def _opened(self, file: int, nbytes: int = 0) -> Tensor:
        """Return all bytes of a file, after it has grown to at least ``nbytes``."""
        memory, size = self._memory.get(file), max(nbytes, os.fstat(file).st_size)
        if memory is None or len(memory) < size:
            try:
                os.posix_fallocate(file, 0, size)
                memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            except OSError as error:
                raise TrainingError(
                    f"there is no memory for a copy of {nbytes:,} bytes of the state of a rank "
                    f"({error.strerror}); train without --survive, or on more ranks"
                ) from error
            self._memory[file] = memory
        return memory

    def read(self) -> tuple[SavedState | None, dict[str, Any] | None]:
        """Return the state of the newest moment and the ``further`` facts of rank 0; None for both
        where there is no copy yet.
        """
        moment = self.newest
        if moment is None:
            return None, None
        documents, tensors = [], dict[str, Tensor]()
        for rank in range(moment.size):
            raw = self._opened(self._files[rank][self._moments(rank)[1] == moment]).numpy().data
            end, length = _HEAD.unpack_from(raw)
            documents.append(document := json.loads(bytes(raw[end : end + length])))
            listed = document["part"]["tensors"]
            specs = ((torch.Size(shape), getattr(torch, dtype)) for shape, dtype in listed.values())
            tensors |= zip(listed, unpack(packing_of(tuple(specs)), raw[_START:]), strict=True)
        first, where = documents[0], "the copy of the state in memory"
        description = joined([document["part"] for document in documents])
        progress = Progress(**first["progress"])
        saved = SavedState(where, tensors, lambda k: tensors[k].clone(), description, progress)
        return saved, first["further"]

    # Losses

    def note_loss(self, index: int, loss: float, samples: int) -> None:
        """Note the loss of the run's step ``index``, from 0, and the samples of its batch."""
        os.pwrite(self._log, _LOSS.pack(loss, samples), index * _LOSS.size)

    def losses(self) -> list[tuple[float, int]]:
        """Return all losses that were noted, with the samples."""
        size = os.fstat(self._log).st_size // _LOSS.size * _LOSS.size
        return list(_LOSS.iter_unpack(os.pread(self._log, size, 0)))


@dataclass(frozen=True)
class Survival:
    """Survival of ranks that die: the others keep their processes, and all go on from the
    newest copies of the state.

    Attributes:
        begin: called with the number of ranks to come, the failure, and the moment of the copies;
            plans anew if there are fewer ranks, and returns the arguments of the ranks' function.
        replaces: whether a new rank takes the place of a dead one.
    """

    copies: SpareCopies
    begin: Callable[[int, str, Moment | None], tuple[Any, ...]]
    replaces: bool = True


_MOST_DEATHS, _MOST_FRUITLESS = 3, 6


@dataclass
class Recoveries:
    """Recoveries since the newest copy. A failure that comes again and again ends the run; a device
    whose ranks die again and again is left out.
    """

    step: int = -2
    count: int = 0
    deaths: Counter[int] = field(default_factory=Counter)

    def note(self, dead: Collection[int], step: int) -> set[int] | None:
        """Note the devices of dead ranks, and the step of the newest copy.

        Returns:
            Devices that are to be left out; None if the run is to end.
        """
        if step > self.step:
            self.step, self.count = step, 0
            self.deaths.clear()
        self.count += 1
        self.deaths.update(dead)
        bad = {device for device, deaths in self.deaths.items() if deaths >= _MOST_DEATHS}
        return None if self.count > _MOST_FRUITLESS else bad
