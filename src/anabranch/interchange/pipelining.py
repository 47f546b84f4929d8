"""A chain plan run by ``torch.distributed.pipelining``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from anabranch.errors import DataError
from anabranch.graph.capture import Captured
from anabranch.interchange.chain import chain_of
from anabranch.interchange.stages import plain_stages
from anabranch.plans.plan import Plan
from anabranch.workload import Batch


class TorchPipeline:
    """This rank's stages under PyTorch's pipelining, with the schedule of the plan.

    ``modules`` can be changed before the first step (``fully_shard``, ``parallelize_module``, ...).
    With replicas, the wrapper that is applied to them averages gradients, as DDP and FSDP do.

    Args:
        captured: the model of the plan, in training mode.
        group: ranks of one pipeline; by default all ranks, for a plan without replicas.
        replica: number of this pipeline, whose slice of every micro-batch it takes.

    Raises:
        NotExpressibleError: if PyTorch's pipelining cannot express the plan.
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        replica: int = 0,
    ) -> None:
        self.chain, self.captured, self.replica = chain_of(plan, captured.graph), captured, replica
        self.device, self.group = torch.device(device), group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if ranks != self.chain.num_ranks:
            raise ValueError(f"the plan has {self.chain.num_ranks} ranks, the group {ranks}")
        own = [s for s, at in enumerate(self.chain.ranks) if at == rank]
        self.stages = plain_stages(self.chain, captured, own, device=device)

    @property
    def modules(self) -> list[fx.GraphModule]:
        """Modules of this rank's stages."""
        return [stage.module for stage in self.stages]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of this rank by the model's own names."""
        for module in self.modules:
            yield from module.named_parameters()

    @cached_property
    def schedule(self) -> Any:
        """PyTorch's schedule, made at the first use, when the modules have been changed."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        chain = self.chain
        share = self.captured.weights(chain.microbatch_size, chain.plan.stage_graph.batch_size)
        weight = share["loss"] * chain.replicas
        stages = [
            PipelineStage(
                stage.module,
                stage.index,
                len(chain.ranks),
                self.device,
                input_args=stage.inputs,
                output_args=stage.outputs,
                group=self.group,
            )
            for stage in self.stages
        ]
        schedule: Any = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            stages,
            chain.num_microbatches,
            loss_fn=lambda output, target: output[0] * weight,
            scale_grads=False,
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "schedule.csv"
            file.write_text(chain.csv)
            schedule._load_csv(str(file))
        return schedule

    def step(self, batch: Batch) -> float | None:
        """Run forward and backward of a whole batch; gradients add up, the optimizer is the user's.

        Returns:
            On the rank of the last stage the loss of this replica's samples, whose mean over
            replicas is the loss of the batch; None on other ranks.

        Raises:
            DataError: for a batch of another size than planned, with which PyTorch would fail.
        """
        losses: list[Tensor] = []
        whole = self.captured.layout.flatten(batch)
        samples, planned = len(next(iter(whole.values()))), self.chain.plan.stage_graph.batch_size
        if samples != planned:
            raise DataError(
                f"the batch has {samples} samples, the plan's {planned}; PyTorch's pipelining "
                "takes batches of one size: leave out a short last one (drop_last=True)"
            )
        tensors = self._own(whole)
        inputs: dict[str, Any] = {"batch": tensors} if tensors else {}
        target = torch.zeros(self.chain.num_microbatches)  # PyTorch insists on targets
        self.schedule.step(**inputs, target=target, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().sum()) if losses else None

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this pipeline's rows of tensors that its stages read, by its micro-batches."""
        graph, count = self.chain.plan.stage_graph, self.chain.num_microbatches
        whole = self.captured.programs.with_statistics(tensors)
        slices = [slice(*graph.slice(0, m, self.replica)) for m in range(count)]
        names = {name for stage in self.stages for name in stage.leaves}
        return {
            name: torch.cat([whole[name][rows] for rows in slices]).to(self.device)
            for name in sorted(names)
        }
