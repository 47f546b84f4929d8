"""Sparse gradients of embedding tables, which are gathered in place of a dense all-reduce.

Every holder of a table sends all others the rows that it looked up, with their gradients; each adds
up all that it receives, in the order of the ranks, so all have the same bits::

    rank 0   | how many | which rows, room for more | their gradients, room for more |
    rank 1   | how many | which rows, room for more | their gradients, room for more |

The room follows from the batch (``cost.sparse``), so that messages have one size that all know. The
sum is a sparse gradient without repeated rows. It equals that of one process up to the order of its
terms: there, too, rows that are looked up more than once are added up in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anabranch.cost.sparse import INDEX_BYTES, message_bytes, most_samples
from anabranch.errors import TrainingError
from anabranch.graph.opgraph import LookupTable
from anabranch.runtime.data_parallel.buckets import Bucket, Named
from anabranch.runtime.data_parallel.shards import Shards
from anabranch.runtime.ranks.collectives import Pending
from anabranch.runtime.ranks.mesh import Mesh, Ranks


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table whose holders exchange rows.

    Attributes:
        slices: micro-batch size and replicas of the stages that read it.
        batch_size: batch size of the plan.
    """

    table: LookupTable
    slices: tuple[tuple[int, int], ...]
    batch_size: int

    def samples(self, batch_size: int) -> int:
        """Return the most samples of a batch that any rank of the group has."""
        return max(most_samples(batch_size, *size) for size in self.slices)

    def rows(self, batch_sizes: Iterable[int]) -> int:
        """Return the most rows that a holder looks up in batches of these sizes."""
        return self.table.lookups * sum(map(self.samples, batch_sizes))

    @property
    def planned_bytes(self) -> int:
        """Bytes of the table's part of a message, for the batch of the plan."""
        return message_bytes(self.table, self.samples(self.batch_size))


class SparseBucket(Bucket):
    """Rows of tables, with room for as many as a batch looks up.

    Args:
        tables: name of a parameter of ``named`` -> its table.
    """

    def __init__(
        self,
        ranks: Ranks,
        named: Iterable[Named],
        tables: Mapping[str, SharedTable],
        mesh: Mesh,
        shards: Shards = (),
    ) -> None:
        super().__init__(ranks, named, mesh, shards)
        self._tables = [tables[name] for name, _ in self.named]

    def hold(self, index: int) -> None:
        """No-op: sparse gradients are concatenated later."""

    def _fill(self, gradients: Sequence[Tensor | None]) -> None:
        first = self.named[0][1]
        self._room = [table.rows(self._batch_sizes) for table in self._tables]
        head = INDEX_BYTES * (len(self.named) + sum(self._room))
        size = sum(room * p[0].nbytes for room, (_, p) in zip(self._room, self.named, strict=True))
        self.flat = torch.zeros(head + size, dtype=torch.uint8, device=first.device)
        counts, indices, values = self._parts(self.flat)
        for i, ((name, _), gradient) in enumerate(zip(self.named, gradients, strict=True)):
            counts[i] = (
                -1 if gradient is None else self._put_rows(name, gradient, indices[i], values[i])
            )

    def _send(self, *, all_get_it: bool) -> list[Pending]:
        assert self.flat is not None
        return [self._mesh.start_all_gather(self.flat, self.ranks)]

    @staticmethod
    def _put_rows(name: str, gradient: Tensor, indices: Tensor, values: Tensor) -> int:
        gradient = gradient.detach()
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        count = gradient._nnz()
        if count > len(indices):
            raise TrainingError(
                f"{name} has a gradient in {count} rows, but the batch looks {len(indices)} up at "
                "most; does a hook on the parameter add to it? Use sparse=False in its embedding"
            )
        indices[:count] = gradient._indices()[0]
        values[:count] = gradient._values()
        return count

    def _parts(self, message: Tensor) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Return views of a rank's message: counts, and per table row numbers and gradients."""
        tables, rooms = len(self.named), self._room
        head = INDEX_BYTES * (tables + sum(rooms))
        numbers = message[:head].view(torch.int64)
        widths = [p[0].numel() for _, p in self.named]
        sizes = [room * width for room, width in zip(rooms, widths, strict=True)]
        values = torch.split(message[head:].view(self.named[0][1].dtype), sizes)
        shaped = [v.view(room, width) for v, room, width in zip(values, rooms, widths, strict=True)]
        return numbers[:tables], torch.split(numbers[tables:], rooms), shaped

    def start_all_gather(self) -> Callable[[], None]:
        shares: list[tuple[Tensor, Pending]] = []
        for _, parameter in self.named:
            parameter.grad = None
            for shard in self.shards:
                rows = shard.of(parameter.detach())
                value = rows.contiguous()
                shares.append((rows, self._mesh.start_broadcast(value, shard.rank, self.ranks)))

        def finish() -> None:
            for rows, share in shares:
                rows.copy_(share.wait())

        return finish

    def wait(self) -> Tensor:
        """Wait for all rows; return each table's count, rank by rank; -1 without a gradient."""
        (pending,) = self._pending
        self._gathered = [self._parts(message) for message in pending.wait()]
        self._pending = []
        return torch.cat([counts for counts, _, _ in self._gathered])

    def hand_out(self, numbers: Sequence[float] | None) -> None:
        """Add the rows up and make them the gradients, by the counts."""
        assert numbers is not None
        parts = self._gathered if self._is_mine else []
        for i, (_, parameter) in enumerate(self.named):
            terms: list[tuple[Tensor, Tensor]] = []
            for r, (_, indices, values) in enumerate(parts):
                count = int(numbers[r * len(self.named) + i])
                if count >= 0:
                    terms.append((indices[i][:count], values[i][:count]))
            parameter.grad = _added(parameter, terms) if terms else None
        self.flat, self._gathered = None, []


def _added(parameter: nn.Parameter, terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    indices = torch.cat([rows for rows, _ in terms])[None]
    values = torch.cat([values for _, values in terms])
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, check_invariants=False
    ).coalesce()
