"""Updates of one rank's parameters from the gradients of its backwards.

::

    step k       last backward of stage 3   last backward of stage 0
                        |                          |
    gradients           +- sum over holders -+     +- sum over holders -+      reducer
                                             |                          |
    optimizer                                +- stage 3                 +- stage 0

Only the sums involve other ranks. Whether all ranks wait for each other before anything is changed
is the caller's choice.

With ``accumulate`` n batches make one update, with the mean of their gradients: ``.grad`` grows
over all of them, is summed over its holders with the last one, and is divided by n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.graph.split import Split
from anabranch.plans.stages import StageGraph
from anabranch.runtime.compute.stage_compute import Outcome
from anabranch.runtime.data_parallel.gradients import (
    Holders,
    clip,
    divide,
    fold_tied,
    sum_of_squares,
)
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.data_parallel.sparse_gradients import SharedTable
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.model_state import ModelState
from anabranch.runtime.numerics.nonfinite import bad_names, norms
from anabranch.runtime.worker import Worker


class Updates:
    """Updates of one rank's parameters from its gradients.

    Attributes:
        reducer: sums them over the ranks; the ``Watcher`` of this rank's steps.
        accumulate: batches that make one update.
        accumulated: those since the last update.

    Args:
        exact: gradients of tied parameters are added in the order of one process, after the step.
        tables: those whose holders exchange rows in place of whole gradients.
    """

    def __init__(
        self,
        state: ModelState,
        parts: Split,
        graph: StageGraph,
        holders: Holders,
        mesh: Mesh,
        *,
        accumulate: int = 1,
        exact: bool = False,
        tables: Mapping[str, SharedTable] | None = None,
    ) -> None:
        self._state, self._parts, self._graph = state, parts, graph
        self._holders, self._mesh, self._exact = holders, mesh, exact
        self._parameters, self._updated = state.parameters, state.updated
        folded = self._folded = self._uses() if exact else {}
        summed = {n: p for n, p in self._parameters.items() if n not in folded}
        self.reducer = Reducer(summed, holders, mesh, tables=tables)
        self.accumulate, self.accumulated = accumulate, 0
        self._is_open = self._is_last = self._is_summed = False
        self._divisor = 1
        self._batch_sizes: list[int] = []  # since the last update

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of this rank between two steps: parameters, gradients, optimizer state."""
        optimizer = self._state.optimizer
        state = optimizer.state.values() if optimizer is not None else ()
        moments = [t for entry in state for t in entry.values() if isinstance(t, Tensor)]
        held = [*self._parameters.values(), *self._state.buffers.values()]
        return [*held, *moments, *self._state.gradients(), *self.reducer.buffers]

    # A batch

    @property
    def is_last(self) -> bool:
        """True if an update is due after the batch that was prepared last."""
        return self._is_last

    def prepare(self, worker: Worker, samples: int, *, alone: bool = False) -> None:
        """Begin a batch.

        Args:
            samples: of all ranks.
            alone: nothing is accumulated and no update will follow.
        """
        if self._is_open:
            self.drop()  # it was interrupted; half a batch must not count
        if self.accumulated == 0:
            self._clear()
        self._is_open = True
        self._batch_sizes.append(samples)
        if not alone:
            self.accumulated += 1
        self._is_last = alone or self.accumulated == self.accumulate
        self._divisor = max(self.accumulated, 1)
        self._is_summed = False
        self._is_alone = alone
        self.reducer.begin(
            worker.last_backwards,
            is_last=self._is_last and not self._exact,
            everywhere=alone,
            batch_sizes=self._batch_sizes,
        )

    def finish(self, worker: Worker, outcome: Outcome) -> None:
        """After a batch; if it was the last of an update, wait until ``.grad`` of what this rank
        updates is the mean over its batches.
        """
        if self._exact and self._is_open:
            self._fold(worker, outcome)
        self._is_open = False
        if not self._is_last or self._is_summed:
            return
        self._is_summed = True
        if self._exact:
            # A stage may hold a parameter without using it in a way that has a gradient; its copy
            # must be updated all the same. One holder has the whole, so the sum changes no bit.
            self.reducer.sum_now(self._batch_sizes)
        else:
            self.reducer.take_all()
        if not self._is_alone:
            self._state.cut_gradients()
        divide(self._updated, self._divisor)

    def check(self, outcome: Outcome) -> None:
        """After ``finish``: note in the outcome which gradients of this rank are not finite."""
        gradients = {n: p.grad for n, p in self._updated.items() if p.grad is not None}
        outcome.bad_parameters.extend(bad_names(gradients))

    def finish_early(self) -> None:
        """End an update with the batches that it has so far."""
        self._is_last = self._is_summed = True
        self.reducer.sum_now(self._batch_sizes)
        self._state.cut_gradients()
        divide(self._updated, self._divisor)

    def drop(self) -> None:
        """Forget all batches since the last update."""
        self.reducer.take_all()
        self._clear()
        self._is_open, self.accumulated = False, 0

    def squares(self) -> list[Tensor]:
        """Return ``sum_of_squares`` of this rank."""
        return sum_of_squares(self._updated, self._holders, self._mesh.rank)

    def apply(self, squares: float = 0.0, largest: float | None = None) -> None:
        """After ``finish``: let the optimizer have the gradients; nothing before the last batch."""
        if not self._is_last:
            return
        self.accumulated = 0
        if largest is not None:
            clip(self._updated, squares, largest)
        if self._state.optimizer is not None:
            self._state.optimizer.step()
        if self._state.scheduler is not None:
            self._state.scheduler.step()

    def start_all_gather(self) -> None:
        """Start the all-gather of updated parameters, which ends by the next forward of a stage
        that reads them; called after an update, or in place of one that some ranks refuse.
        """
        if self._is_last:
            self.reducer.start_all_gather()
            for shard in self._state.shards.values():
                shard.grad = None  # it was where parameters are now

    def finish_all_gather(self) -> None:
        """Wait for the all-gather of all parameters of this rank."""
        self.reducer.finish_all_gather()

    @property
    def may_guard(self) -> bool:
        """True if an update is due from an optimizer that the device can tell to do nothing, as
        fused ones can for ``torch.amp.GradScaler``.
        """
        optimizer = self._state.optimizer
        knows = getattr(optimizer, "_step_supports_amp_scaling", False)
        return bool(self._is_last and knows and not self._has_sparse)

    @property
    def _has_sparse(self) -> bool:
        return any(gradient.is_sparse for gradient in self._state.gradients())

    def apply_guarded(self, losses: Sequence[Tensor]) -> Tensor:
        """As ``apply``, but for the scheduler, if all gradients and these losses are finite, which
        the host does not wait to know.

        Returns:
            One where nothing was done.
        """
        optimizer: Any = self._state.optimizer
        numbers = [
            number.double().reshape(()) for number in (*norms(self._state.gradients()), *losses)
        ]
        total = torch.stack(numbers).sum() if numbers else torch.zeros(())
        guard = (~total.isfinite()).float()
        optimizer.grad_scale, optimizer.found_inf = None, guard
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        return guard

    def end_guarded(self) -> None:
        """After ``apply_guarded``, where it has made the update."""
        self.accumulated = 0
        if self._state.scheduler is not None:
            self._state.scheduler.step()

    def _clear(self) -> None:
        self._batch_sizes.clear()
        self._state.forget_gradients()

    # Exact mode

    def _uses(self) -> dict[str, list[tuple[int, int]]]:
        """Tied parameter -> (order, rank) of all its uses, on all ranks."""
        uses: dict[str, list[tuple[int, int]]] = {}
        for s, stage in enumerate(self._graph.stages):
            rank = self._graph.rank_of[stage.devices[0]]
            for use in self._parts.program(s, stage.microbatch_size).tied:
                uses.setdefault(use.name, []).append((use.order, rank))
        return uses

    def _fold(self, worker: Worker, outcome: Outcome) -> None:
        fold_tied(
            outcome.tied,
            self._parameters,
            self._folded,
            worker.graph.num_microbatches(0),
            self._holders,
            self._mesh,
        )
