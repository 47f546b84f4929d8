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

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.checkpoint.optimizer import laid_out
from anabranch.cost.sparse import rows_pay
from anabranch.device import accelerator
from anabranch.errors import TrainingError
from anabranch.runtime.compute.outcome import GradientNorms, Outcome
from anabranch.runtime.data_parallel.buckets import dense
from anabranch.runtime.data_parallel.gradients import clip, divide, gradients_of, sum_of_squares
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.data_parallel.sparse_gradients import SharedTable
from anabranch.runtime.session import Session
from anabranch.runtime.state.optimizer_facts import TakenGradients, taken_gradients
from anabranch.runtime.worker import Worker


class Updates:
    """Updates of one rank's parameters from its gradients.

    Attributes:
        reducer: sums gradients over the ranks; the ``Watcher`` of this rank's steps.
        accumulate: batches that make one update.
        accumulated: batches since the last update.
        is_last: whether an update is due after the batch that was prepared last.
    """

    def __init__(self, session: Session) -> None:
        self._state, self._parts, self._graph = session.state, session.parts, session.graph
        self._holders, self._mesh = session.holders, session.mesh
        # Gradients of tied parameters are added as one process would, after the step.
        self._exact = session.options.exact
        self._parameters, self._updated = self._state.parameters, self._state.updated
        folded = self._folded = self._uses() if self._exact else {}
        summed = {n: p for n, p in self._parameters.items() if n not in folded}
        tables = _shared_tables(session)
        self._row_tables = row_tables(session)
        self.reducer = Reducer(summed, self._holders, self._mesh, tables=tables)
        self.accumulate, self.accumulated = session.options.accumulate, 0
        self._is_open = self.is_last = self._is_alone = self._is_guarded = False
        self._batch_sizes: list[int] = []  # since the last update

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of this rank between two steps: parameters, gradients, optimizer state."""
        state = self._state
        held = [*state.parameters.values(), *state.buffers.values(), *state.optimizer_tensors]
        return [*held, *state.gradients(), *self.reducer.buffers]

    # A batch

    def prepare(self, worker: Worker, samples: int, *, alone: bool = False) -> None:
        """Begin a batch.

        Args:
            samples: samples of the batch, over all ranks.
            alone: whether nothing is accumulated and no update will follow.
        """
        if self._is_open:
            self.drop()  # it was interrupted; half a batch must not count
        if self.accumulated == 0:
            self._clear()
        self._is_open = True
        self._batch_sizes.append(samples)
        if not alone:
            self.accumulated += 1
        self.is_last = alone or self.accumulated == self.accumulate
        self._is_alone = alone
        if alone and self._holders.shards and self._state.optimizer and not self._is_guarded:
            self._state.optimizer.register_step_pre_hook(self._refuse_own_update)
            self._is_guarded = True
        self.reducer.begin(
            worker.last_backwards,
            is_last=self.is_last and not self._exact,
            everywhere=alone,
            batch_sizes=self._batch_sizes,
        )

    def _refuse_own_update(self, *_: Any) -> None:
        if self._is_alone:
            raise TrainingError(
                "under shard_optimizer a step of the optimizer behind gradients() would leave out "
                "parameters; call step, or make the pipeline with shard_optimizer=False"
            )

    def finish(self, worker: Worker, outcome: Outcome) -> None:
        """End a batch; after the last one of an update, ``.grad`` is the mean over its batches."""
        if self._exact:
            self._fold_tied(outcome.tied, worker.graph.num_microbatches(0))
        self._is_open = False
        if self.is_last:
            # In exact mode a stage may hold a parameter without using it in a way that has a
            # gradient; its copy must be updated all the same. One holder has the whole, so the sum
            # changes no bit.
            self._take_sums(now=self._exact)

    def check(self, outcome: Outcome) -> None:
        """After ``finish``: have the outcome note which gradients of this rank are not finite."""
        outcome.bring(GradientNorms(gradients_of(self._updated)))

    def finish_early(self) -> None:
        """End an update with the batches that it has so far; see ``finish``."""
        self.is_last = True
        self._take_sums(now=True)

    def _take_sums(self, *, now: bool) -> None:
        """Wait for the sums over the holders, which begin ``now`` or have begun already."""
        if now:
            self.reducer.sum_now(self._batch_sizes)
        else:
            self.reducer.take_all()
        if not self._is_alone:
            self._state.cut_gradients()
        divide(self._updated, self.accumulated)

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
        if not self.is_last:
            return
        if largest is not None:
            clip(self._updated, squares, largest)
        make_rows(self._updated, self._row_tables)
        if self._state.optimizer is not None:
            self._state.optimizer.step()
        self.accumulated = 0
        self.advance()

    def all_gather(self) -> None:
        """Receive parameters that other ranks have updated, also if some refused the update."""
        if self.is_last:
            self.reducer.all_gather()
            for shard in self._state.shards.values():
                shard.grad = None  # its memory has updated parameters now

    @property
    def may_guard(self) -> bool:
        """True if an update is due from an optimizer that a device can stop, as fused ones."""
        optimizer = self._state.optimizer
        knows = getattr(optimizer, "_step_supports_amp_scaling", False)
        is_sparse = any(gradient.is_sparse for gradient in self._state.gradients())
        return bool(self.is_last and knows and not is_sparse)

    def apply_guarded(self, outcome: Outcome) -> None:
        """Update like ``apply``, without the scheduler, if the device finds norms of all gradients
        and losses finite; the host reads from the outcome later whether it did.
        """
        optimizer: Any = self._state.optimizer
        norms = GradientNorms(gradients_of(self._updated))
        numbers = [*norms.tensors, *outcome.unread_losses]
        outcome.bring(norms)
        guard = torch.zeros(())
        if numbers:
            precise = accelerator.widest_float(numbers[0].device)
            flat = torch.cat([number.to(precise).reshape(-1) for number in numbers])
            guard = (~flat.isfinite().all()).float()
        optimizer.grad_scale, optimizer.found_inf = None, guard
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        self.accumulated = 0

    def advance(self) -> None:
        """Step the scheduler after an update."""
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

    def _fold_tied(
        self, uses: Mapping[tuple[str, int, int], Tensor], num_microbatches: int
    ) -> None:
        """Add up the gradients of tied parameters in the order in which one process would.

        Autograd adds the uses of a tensor from the last to the first, and ``.grad`` grows by
        micro-batch, on top of the sum of earlier batches of the same update, which a parameter that
        is frozen now keeps.

        Args:
            uses: (parameter, micro-batch, order) -> gradient of one use on this rank.
        """
        tied = self._folded.keys() & self._parameters.keys()
        for name in sorted(tied, key=lambda name: (self._holders.parameters[name], name)):
            parameter, ranks = self._parameters[name], self._holders.parameters[name]
            if not parameter.requires_grad:
                continue
            total = parameter.grad
            for microbatch in range(num_microbatches):
                folded: Tensor | None = None
                for order, rank in sorted(self._folded[name]):
                    term = uses.get((name, microbatch, order))
                    gradient = torch.zeros_like(parameter) if term is None else dense(term)
                    gradient = gradient.detach().contiguous()
                    self._mesh.broadcast(gradient, rank, ranks)
                    folded = gradient if folded is None else folded + gradient
                assert folded is not None
                total = folded if total is None else total + folded
            parameter.grad = None if total is None else laid_out(total, parameter)


def row_tables(session: Session) -> frozenset[str]:
    """Return the tables with sparse gradients, if the optimizer takes only sparse ones."""
    if taken_gradients(session.state.optimizer) is not TakenGradients.SPARSE:
        return frozenset()
    parameters = session.captured.graph.parameters
    return frozenset(p.name for p in parameters if p.table and p.table.sparse)


def make_rows(parameters: Mapping[str, nn.Parameter], tables: Collection[str]) -> None:
    """Make gradients of tables that were summed whole sparse, without the rows that are zero."""
    for name in tables:
        table = parameters.get(name)
        if table is not None and table.grad is not None and not table.grad.is_sparse:
            table.grad = table.grad.to_sparse(1)


def _shared_tables(session: Session) -> dict[str, SharedTable]:
    """Return the tables whose holders exchange rows, the same on all ranks, which all call it:
    gradients are sparse, the optimizers of all holders take sparse ones, and rows of the plan's
    batch cost less than the table, or an optimizer takes nothing else.
    """
    graph, stages, holders = session.captured.graph, session.graph, session.holders
    options, optimizer = session.workers.options, session.state.optimizer
    if options.backend is not None:
        return {}  # compiled backwards give whole gradients
    candidates = {}
    for parameter in graph.parameters:
        table, name = parameter.table, parameter.name
        is_shared = len(holders.parameters.get(name, ())) > 1
        if (
            parameter.trainable
            and is_shared
            and table
            and (table.sparse or options.sparse_embeddings)
        ):
            read = (stages.stages[s] for s in holders.stages[name])
            slices = tuple((stage.microbatch_size, stage.replicas) for stage in read)
            candidates[name] = SharedTable(table, slices, stages.batch_size)
    if not candidates:
        return {}
    takes = session.mesh.gather(taken_gradients(optimizer))
    sizes = {parameter.name: parameter.nbytes for parameter in graph.parameters}
    chosen = {}
    for name, shared in candidates.items():
        kinds = {takes[rank] for rank in holders.parameters[name]}
        samples = shared.samples(stages.batch_size) * session.options.accumulate
        pays = rows_pay(shared.table, sizes[name], samples, len(holders.parameters[name]))
        if TakenGradients.SPARSE in kinds or (TakenGradients.DENSE not in kinds and pays):
            chosen[name] = shared
    return chosen
