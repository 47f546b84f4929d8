"""Transfer of a run's state to the disk and back, and in memory from one plan to the next.

Under another plan ranks send each other what they would write into a checkpoint and read from it::

    plan A   rank 0  embed, blocks.0        rank 1  blocks.1, head
                |          \\                  |         |
    plan B   rank 0  embed   `-------> rank 1  blocks.0  |  blocks.1
                                       rank 2                head
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.checkpoint import Checkpoint, Progress, RankPart
from anabranch.checkpoint.plain import PlainWeights
from anabranch.checkpoint.reading import SavedState
from anabranch.checkpoint.saving import Saving
from anabranch.checkpoint.writing import Target, joined
from anabranch.device import accelerator
from anabranch.errors import warn
from anabranch.runtime.assignment import Assignment
from anabranch.runtime.data_feed import DataFeed
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.state.model_state import ModelState
from anabranch.runtime.state.spare_copies import SpareCopies
from anabranch.runtime.worker_cache import WorkerCache


@dataclass(eq=False)
class Checkpointing:
    """Checkpoints of one rank's part of a run; no batch may be in flight.

    Attributes:
        run_id: a number of the run, the same on every rank.
        failing: the context in which a failure reaches the other ranks.
        settle: waits until it is known whether the last step was a good one.
    """

    assignment: Assignment
    state: ModelState
    workers: WorkerCache
    feed: DataFeed
    run_id: int
    failing: Callable[[], AbstractContextManager[None]]
    settle: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._mesh, self._batch_size = self.workers.mesh, self.workers.stage_graph.batch_size
        self._saving: Saving | None = None
        self._copies: dict[str, Tensor] = {}
        self._num_saved = 0

    def save(
        self,
        folder: str | Path,
        further: Mapping[str, Tensor] | None = None,
        *,
        wait: bool,
        keep: int | None,
    ) -> Saving:
        """Write a checkpoint in a thread, which gives it its name once it is confirmed.

        Args:
            wait: confirm it, and wait until it is on the disk.
            keep: how many checkpoints there may be in its parent folder.
        """
        self.finish()
        with self.failing(), POSITION.doing(Phase.SAVE):
            self.state.require_values()
            self._num_saved += 1
            number = hashlib.sha256(f"{self.run_id} {self._num_saved}".encode()).hexdigest()[:16]
            target = Target(Path(folder).absolute(), number, self._mesh.size, self.progress())
            copies = None if wait else self._copies
            without = () if self.assignment.workload.save_frozen else self.state.constants
            part = self.state.part(further or {}, copies=copies, without=without)
            self._saving = saving = Saving(
                target,
                self._mesh.rank,
                part,
                keep=keep,
                timeout=self.assignment.options.timeout,
                ready=accelerator.waiter(self.workers.device),
            )
            if wait:
                self._mesh.barrier()  # the first rank has made the folder, and not failed
                saving.confirm()
                saving.wait(POSITION.waiting)
                self._mesh.barrier()
                self._saving = None
        return saving

    @property
    def is_open(self) -> bool:
        """True while the step of the checkpoint that is being written may turn out a bad one."""
        return self._saving is not None and self._saving.is_open

    def check(self) -> None:
        """Raise what went wrong with the checkpoint that is being written."""
        if self._saving is not None:
            with self.failing():
                self._saving.check()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self.is_open:
            self.settle()
        saving, self._saving = self._saving, None
        if saving is not None:
            with self.failing(), POSITION.doing(Phase.SAVE):
                saving.wait(POSITION.waiting)

    def give_up(self) -> None:
        """Leave the checkpoint that is being written without a name."""
        if self._saving is not None:
            self._saving.give_up()

    def load(self, folder: str | Path) -> Checkpoint:
        """Take over a checkpoint, before the first step."""
        with self.failing(), POSITION.doing(Phase.START_UP):
            saved = Checkpoint(folder)
            saved.verify(self._mesh.rank, self._mesh.size)
            self._mesh.barrier()  # nothing is taken over before all files are known to be whole
            saved.require_model(self.state.names)
            self.restore(saved)
        if self._mesh.rank == 0:
            self._warn_of_other_batches(saved.progress)
            self._warn_of_other_updates(saved.progress)
        return saved

    def load_weights(self, path: str | Path) -> None:
        """Take over weights that something else saved; see ``load``."""
        with self.failing(), POSITION.doing(Phase.START_UP):
            self.state.load_weights(PlainWeights(path))

    def hand_over(self, holders: Holders) -> SavedState:
        """Send all ranks the state that they need under another plan, and free it here."""
        self.finish()
        with self.failing(), POSITION.doing(Phase.MOVE):
            part = self.state.part({}, copies=None)
            # The feed goes on by itself.
            progress = self.progress().model_copy(update={"data": None})
            readers = {key: holders.readers(key, self._mesh.size) for key in part.tensors}
            moved = move(part, readers, progress, self._mesh)
        self.state.forget_training()
        return moved

    def copy_to(self, copies: SpareCopies, further: Mapping[str, Any]) -> Callable[[], None]:
        """Copy this rank's part into memory that outlives it; see ``SpareCopies.keep``."""
        with self.failing(), POSITION.doing(Phase.SAVE):
            part = self.state.part({}, copies=None)
            return copies.keep(self._mesh.rank, self._mesh.size, part, self.progress(), further)

    def restore(self, saved: SavedState) -> None:
        """Take over the state of a run of the same model, by this or another plan."""
        self.state.load(saved)
        progress, scale = saved.progress, self.workers.loss_scale
        self.workers.seed = progress.seed
        self.feed.go_on_from(progress)
        if scale is not None and progress.loss_scale is not None:
            scale.scale, scale.streak = progress.loss_scale, progress.loss_streak

    def progress(self) -> Progress:
        feed, scale = self.feed, self.workers.loss_scale
        return Progress(
            step=feed.step_number,
            epoch=feed.epoch,
            position=feed.position,
            seed=self.workers.seed,
            loss_scale=None if scale is None else scale.scale,
            loss_streak=0 if scale is None else scale.streak,
            data=self._loader_state(),
            batch_size=self._batch_size,
            accumulate=self.assignment.options.accumulate,
        )

    def _loader_state(self) -> dict[str, Any] | None:
        """Return the position of a loader that has one, as far as JSON can hold it."""
        if self._mesh.rank != 0 or (state := self.feed.loader_state()) is None:
            return None
        try:
            kept = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError):
            kept = None
        if kept != state:
            warn(
                "the state_dict of the loader holds more than JSON can (numbers, texts, lists, and "
                "mappings by texts), so the checkpoint has the number of batches alone: training "
                "that resumes reads up to it"
            )
            return None
        return state

    def _warn_of_other_batches(self, progress: Progress) -> None:
        before, now = progress.batch_size, self._batch_size
        if before in (0, now):
            return
        within = (
            f"; {progress.position} batches of epoch {progress.epoch} are done, behind which as "
            "many of the new size are left out, so some samples come twice or not at all"
        )
        warn(
            f"the checkpoint was trained with batches of {before} samples, this run has {now}"
            f"{within if progress.position else ''}; --batch-size {before}, or a plan for it, goes "
            "on as before"
        )

    def _warn_of_other_updates(self, progress: Progress) -> None:
        before, now = progress.accumulate, self.assignment.options.accumulate
        if before not in (0, now):
            warn(
                f"the checkpoint was trained with {_counted(before)} to an update, this run has "
                f"{_counted(now)}; accumulate={before} (in a run file accumulate = {before}) goes "
                "on as before"
            )


def _counted(batches: int) -> str:
    return f"{batches} batch{'es' * (batches != 1)}"


_BUNDLE_BYTES = 1 << 28
"""Most bytes in flight at once, unless one tensor is larger; more would mean less waiting and more
memory.
"""
_CPU = torch.device("cpu")


def move(
    part: RankPart, readers: Mapping[str, Sequence[int]], progress: Progress, mesh: Mesh
) -> SavedState:
    """Send this rank's tensors to the ranks that need them, and receive those that it needs; all
    ranks call it.

    Args:
        part: part of a checkpoint that this rank would write; all parts have each tensor once.
        readers: tensor of the part -> ranks that need it.
        progress: progress of training, the same on every rank.
    """
    listed = {key: [*entry, list(readers[key])] for key, entry in part.listed.items()}
    documents = mesh.gather({**part.description, "tensors": listed})
    everything = sorted(
        (key, owner, *entry)
        for owner, document in enumerate(documents)
        for key, entry in document["tensors"].items()
    )
    tensors: dict[str, Tensor] = {}
    transport = mesh.transport(_CPU)
    flying = 0
    for key, owner, size, dtype, ranks in everything:
        if owner == mesh.rank:
            tensor = part.tensors[key].detach()
            if mesh.rank in ranks:
                tensors[key] = tensor
            if others := [rank for rank in ranks if rank != owner]:
                plain = tensor.cpu().contiguous()
                for rank in others:
                    assert transport is not None
                    transport.send([plain], rank, tag=0)
        elif mesh.rank in ranks:
            assert transport is not None
            spec = torch.Size(size), getattr(torch, dtype)
            # A copy: what has arrived lies in the sender's memory, which is about to end.
            tensors[key] = transport.receive([spec], _CPU, owner, tag=0).wait()[0].clone()
        flying += torch.Size(size).numel() * getattr(torch, dtype).itemsize * len(ranks)
        if flying > _BUNDLE_BYTES:
            mesh.barrier()  # what was sent has been taken
            flying = 0
    mesh.barrier()
    if transport is not None:
        transport.close()
    where = "the state that the ranks have sent each other"
    return SavedState(where, tensors, tensors.__getitem__, joined(documents), progress)
