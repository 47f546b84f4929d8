"""A reducer sums gradients over their holders while the rest of the step goes on.

A hook on every parameter that others hold as well moves its first gradient into its bucket, where
the following ones are added (``buckets``). A gradient is final once autograd has added the last
micro-batch's share, in the backward of the stage on this rank that has its last backward last. The
hook notes that; when all of a bucket are final, its sum starts in the background::

    rank 1   1B6 | 1B7: layer 3  layer 2  layer 1 |
                              [ 3 and 2: all-reduce   ]
                                            [ 1: all-reduce ]
    rank 2   ...                               | 1B7: layer 3 ...

Buckets of one set of ranks start in one order on all of them: last stages first, in each the last
parameters first, which is the order of the backwards. One that is final earlier waits for its turn.
Nobody waits in line for a sum before the step has ended, so no order of actions can deadlock over
them. Every set has a process group of its own.

A parameter that gets no gradient in the last backward is final when that backward ends.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anabranch.cost.buckets import all_reduce_order, cut_into_buckets
from anabranch.remembered import remembered
from anabranch.runtime.data_parallel.buckets import Bucket, DenseBucket, Named
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.data_parallel.shards import Shards
from anabranch.runtime.data_parallel.sparse_gradients import SharedTable, SparseBucket
from anabranch.runtime.ranks.mesh import Mesh, Ranks
from anabranch.runtime.ranks.placement import fetched


@dataclass(slots=True)
class _Queue:
    """The buckets of one set of ranks, in their order, and how many have started."""

    buckets: list[Bucket]
    started: int = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    """Place of a parameter: bucket, queue of the bucket, index in it."""

    queue: _Queue
    bucket: Bucket
    index: int


class Reducer:
    """Sums gradients over the ranks that hold a parameter; a ``Watcher`` of their backwards.

    Attributes:
        terms: numbers that are finite if this rank's terms of the last sums were; with ``notes``.

    Args:
        notes: whether to note if this rank's own terms are finite, to be read afterwards.
        tables: tables whose holders exchange rows; other gradients are summed whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        holders: Holders,
        mesh: Mesh,
        *,
        notes: bool = False,
        tables: Mapping[str, SharedTable] | None = None,
    ) -> None:
        tables, self._mesh = tables or {}, mesh
        self._parameters, self._stages_of = parameters, holders.stages
        # A parameter that is frozen for some steps, even the first, has its place all the same.
        self._trainable = [name for name, p in parameters.items() if p.requires_grad]
        self._notes, self.terms = notes, list[Tensor]()
        groups: dict[tuple[Ranks, tuple[int, ...], bool], list[Named]] = defaultdict(list)
        for name in reversed(self._trainable):
            ranks = holders.parameters[name]
            if len(ranks) > 1:
                key = ranks, holders.stages[name], name in tables
                groups[key].append((name, parameters[name]))
        queues: dict[Ranks, _Queue] = {}
        self._slots: dict[str, _Slot] = {}
        for (ranks, _, are_tables), named in sorted(
            groups.items(), key=lambda g: (all_reduce_order(*g[0][:2]), g[0])
        ):
            queue = queues.setdefault(ranks, _Queue([]))
            for bucket in _buckets(ranks, named, tables if are_tables else {}, holders, mesh):
                queue.buckets.append(bucket)
                for index, (name, _) in enumerate(bucket.named):
                    self._slots[name] = _Slot(queue, bucket, index)
        self._queues = tuple(queues.values())
        # Hooks stay from step to step: to take one off and put it on again costs as much as what
        # it does. They count only in batches, up to the last backward that reaches a parameter.
        self._handles: dict[str, RemovableHandle] = {}
        self._hooked: set[str] = set()
        weakref.finalize(self, _remove, self._handles)
        self._waiting: set[str] = set()
        self._armed: set[str] = set()

    @remembered
    def finals(self, order: tuple[int, ...]) -> Mapping[int, Sequence[str]]:
        """Return the trainable parameters whose gradients are final after a stage's last backward.

        Args:
            order: stages with a backward on this rank, in the order of their last ones.

        Returns:
            Stage -> names; under -1 those that no backward of this rank reaches.
        """
        at = {stage: i for i, stage in enumerate(order)}
        finals: dict[int, list[str]] = {stage: [] for stage in (*order, -1)}
        for name in self._trainable:
            stages = [stage for stage in self._stages_of[name] if stage in at]
            finals[max(stages, key=at.__getitem__, default=-1)].append(name)
        return finals

    @property
    def buffers(self) -> list[Tensor]:
        flats = (bucket.flat for queue in self._queues for bucket in queue.buckets)
        return [flat for flat in flats if flat is not None]

    def begin(
        self,
        order: Sequence[int],
        *,
        is_last: bool = True,
        everywhere: bool = False,
        batch_sizes: Sequence[int] = (),
    ) -> None:
        """Begin a batch; see ``finals``.

        Args:
            batch_sizes: sizes of all batches whose gradients are summed together; for tables.
            is_last: whether its last backwards make gradients final, which are to be summed.
            everywhere: whether all holders get the sums, not only those that update a parameter.
        """
        self._everywhere = everywhere
        self._order, self._armed = tuple(order), set()
        finals = self.finals(self._order)
        self._hooked = {name for stage in order for name in finals[stage] if name in self._slots}
        for name in self._hooked - self._handles.keys():
            # A frozen parameter has no gradient, which is known when its stage is done.
            if self._parameters[name].requires_grad:
                add = self._parameters[name].register_post_accumulate_grad_hook
                self._handles[name] = add(_hook(weakref.ref(self), name))  # type: ignore[no-untyped-call]
        self._waiting = set(self._slots) if is_last else set()
        self.terms = []

        for queue in self._queues:
            queue.started = 0
            for bucket in queue.buckets:
                bucket.begin(batch_sizes)
        self.after_last(-1)

    def before_last(self, stage: int) -> None:
        """Note that the last backward of a stage begins; see ``Watcher``."""
        self._armed = set(self.finals(self._order)[stage])

    def _accumulated(self, name: str) -> None:
        """Note that a parameter has the gradient of one more micro-batch."""
        if name in self._hooked:
            slot = self._slots[name]
            slot.bucket.hold(slot.index)
            if name in self._armed:
                self._is_final(name)

    def after_last(self, stage: int) -> None:
        """Note that the last backward of a stage has ended; missing gradients are final as well."""
        names = self.finals(self._order)[stage]
        self._hooked.difference_update(names)
        for name in names:
            self._is_final(name)

    def sum_now(self, batch_sizes: Sequence[int] = (), *, everywhere: bool = False) -> None:
        """Sum the gradients as they are, and wait for it; see ``begin``."""
        self.begin((), batch_sizes=batch_sizes, everywhere=everywhere)
        self.take_all()

    def _is_final(self, name: str) -> None:
        if name not in self._waiting:
            return
        self._waiting.remove(name)
        slot = self._slots[name]
        slot.bucket.put(slot.index)
        queue = slot.queue
        while queue.started < len(queue.buckets) and not queue.buckets[queue.started].missing:
            bucket = queue.buckets[queue.started]
            if self._notes and bucket.flat is not None:
                self.terms.append(bucket.flat.sum())
            bucket.start(everywhere=self._everywhere)
            queue.started += 1

    def all_gather(self) -> None:
        """Receive the parameters that other ranks have updated; all ranks call it between the same
        sums.

        Overlap with passes of the next step would gain nothing where a device has one stage, which
        reads the parameters gathered last, and less than 1 % of a step where it has several.
        """
        queues = sorted(self._queues, key=lambda queue: queue.buckets[0].ranks)
        buckets = [bucket for queue in queues for bucket in reversed(queue.buckets)]
        finishes = [bucket.start_all_gather() for bucket in buckets if bucket.shards]
        self._mesh.begin_sums()
        for finish in finishes:
            finish()

    def take_all(self) -> None:
        """Wait for all sums and make them the gradients; reads the device once, or not at all."""
        buckets = (bucket for queue in self._queues for bucket in queue.buckets)
        flags = {bucket: bucket.wait() for bucket in buckets if bucket.is_pending}
        numbers = iter(fetched([part for part in flags.values() if part is not None]))
        for bucket, part in flags.items():
            bucket.hand_out(None if part is None else list(islice(numbers, len(part))))


def _buckets(
    ranks: Ranks,
    named: Sequence[Named],
    tables: Mapping[str, SharedTable],
    holders: Holders,
    mesh: Mesh,
) -> Iterator[Bucket]:
    """Generate buckets of one element type and the same updaters each, of tables or of none."""

    def nbytes(item: Named) -> int:
        name, parameter = item
        return tables[name].planned_bytes if tables else parameter.nbytes

    for run in cut_into_buckets(named, nbytes, lambda item: item[1].dtype):
        by_shards: dict[Shards, list[Named]] = defaultdict(list)
        for name, parameter in run:
            by_shards[holders.shards.get(name, ())].append((name, parameter))
        for shards, part in by_shards.items():
            if tables:
                yield SparseBucket(ranks, part, tables, mesh, shards)
            else:
                yield DenseBucket(ranks, part, mesh, shards)


def _hook(reducer: weakref.ref[Reducer], name: str) -> Callable[[Tensor], None]:
    """Return the hook of a parameter, which may outlive the reducer."""

    def accumulated(_: Tensor) -> None:
        if (alive := reducer()) is not None:
            alive._accumulated(name)

    return accumulated


def _remove(handles: Mapping[str, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
