"""Parameters, buffers and optimizer of one rank, and their way to the disk and back.

On the disk everything goes by the model's own names. Each tensor is saved by the one rank that
speaks for it (``Holders.owner``), and what no stage reads by rank 0, so a checkpoint has the whole
model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from anabranch import checkpoint as disk
from anabranch.errors import FileFormatError, TrainingError
from anabranch.runtime.data_parallel.gradients import Holders, same_start, share_first
from anabranch.runtime.initialisation import materialise, meta_names, require_values
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.placement import move
from anabranch.workload import Workload


class ModelState:
    """A rank's parameters, buffers, optimizer and scheduler; None where there is nothing to train.

    Ranks that built the module from another seed get the tensors of rank 0. Those of this rank's
    stages are moved to its device, or made there from ``seed`` where the module is on the meta
    device.
    """

    def __init__(
        self, workload: Workload, holders: Holders, mesh: Mesh, place: torch.device, seed: int
    ) -> None:
        module = workload.module
        self._module, self._holders, self._mesh = module, holders, mesh
        _refuse_forgotten(module)
        nothing = {*meta_names(module)}
        same_start({n: t for n, t in self._everything().items() if n not in nothing}, mesh)
        mine = {name for name in nothing if self._is_held(name)}
        self._without = materialise(module, mine, seed=seed, place=place)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in module.named_parameters()
            if mesh.rank in holders.parameters.get(name, ())
        }
        self.buffers: dict[str, Tensor] = {
            name: buffer
            for name, buffer in module.named_buffers()
            if mesh.rank in holders.buffers.get(name, ())
        }
        self._homes = {name: tensor.device for name, tensor in self._everything().items()}
        # Before there is an optimizer, which may look where they are.
        move((*self.parameters.values(), *self.buffers.values()), place)
        if place.type != "cpu":
            # They may be needed once more, for the self-check.
            others = [t for name, t in self._everything().items() if not self._is_held(name)]
            move((t for t in others if t.device == place), torch.device("cpu"))
        trainable = [
            (name, p)
            for name, p in self.parameters.items()
            if p.requires_grad and holders.updaters.get(name, mesh.rank) == mesh.rank
        ]
        self.optimizer = workload.optimizer(trainable) if trainable else None
        recipe = workload.scheduler
        self.scheduler = recipe(self.optimizer) if recipe and self.optimizer else None
        _refuse_unsupported(self.optimizer, self.scheduler)

    def _everything(self) -> dict[str, Tensor]:
        return dict((*self._module.named_parameters(), *self._module.named_buffers()))

    def _is_unheld(self, name: str) -> bool:
        return name not in self._holders.parameters and name not in self._holders.buffers

    def _is_held(self, name: str) -> bool:
        """Whether this rank has values of a tensor; what no stage reads is with rank 0."""
        ranks = self._holders.parameters.get(name) or self._holders.buffers.get(name) or (0,)
        return self._mesh.rank in ranks

    def require_values(self) -> None:
        """Raise a TrainingError where something of this rank has never got values."""
        require_values(self._module, self._without)

    def _saves(self, name: str) -> bool:
        owner = 0 if self._is_unheld(name) else self._holders.owner(name)
        return owner == self._mesh.rank

    def forget_others(self) -> None:
        """Give the memory of other stages' parameters back; whoever reads them sees NaN."""
        if self._mesh.size == 1:
            return
        for name, parameter in self._module.named_parameters():
            if name not in self.parameters and not self._is_unheld(name) and not parameter.is_meta:
                nothing = torch.tensor(float("nan") if parameter.is_floating_point() else 0)
                nothing = nothing.to(dtype=parameter.dtype, device=self._homes[name])
                parameter.data = nothing.expand(parameter.shape)
                parameter.grad = None

    def share_buffers(self) -> None:
        """Give all replicas of a stage the buffers of the first, such as running means."""
        share_first(self.buffers, self._holders.buffers, self._mesh)

    def without_gradient(self) -> list[str]:
        """Trainable parameters that this rank speaks for and no gradient has reached."""
        return [
            name
            for name, p in self.parameters.items()
            if p.requires_grad and p.grad is None and self._holders.owner(name) == self._mesh.rank
        ]

    def gradients(self) -> list[Tensor]:
        """Of this rank's parameters, as far as there are any."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def save(
        self, folder: Path, progress: disk.Progress, further: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write a checkpoint, all ranks together.

        Raises:
            TrainingError: if the folder exists or cannot be written.
        """
        mesh = self._mesh
        # Not the global generator: saving must not change what is drawn after it.
        generator = torch.Generator().manual_seed(time.time_ns() % 2**62)
        shared = torch.randint(2**62, (1,), generator=generator)
        mesh.broadcast(shared, 0)
        token = int(shared)
        try:
            self.share_buffers()
            if mesh.rank == 0:
                disk.begin(folder, token)
            mesh.barrier()
            disk.write_part(folder, token, mesh.rank, self._part(further or {}))
            mesh.barrier()
            if mesh.rank == 0:
                disk.finish(folder, token, mesh.size, progress)
            mesh.barrier()
        except BaseException:
            if mesh.rank == 0:
                disk.abandon(folder, token)
            raise

    def _part(self, further: Mapping[str, Tensor]) -> disk.RankPart:
        tensors = {
            f"model/{name}": tensor
            for name, tensor in self._everything().items()
            if self._saves(name)
        }
        mine = {key: t for key, t in further.items() if self._saves(key.partition("/")[2])}
        tensors |= mine
        if self.optimizer is None:
            return disk.RankPart(tensors)
        owned = {name for name in self.parameters if self._saves(name)}
        state, groups, scalars = disk.optimizer_part(self.optimizer, self._names(), owned)
        scheduler = self.scheduler.state_dict() if self.scheduler is not None else None
        return disk.RankPart(
            tensors | state, groups, type(self.optimizer).__name__, scalars, scheduler
        )

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.parameters.items()}

    def load(self, saved: disk.Checkpoint, *, everything: bool = False) -> None:
        """Take over what a checkpoint has for this rank.

        Raises:
            FileFormatError: naming file and key, if it is damaged or of another model.
        """
        model = self._everything()
        saved.require([f"model/{name}" for name in model])
        unknown = sorted(set(saved.keys("model")) - set(model))
        if unknown:
            raise FileFormatError(
                f"{saved.folder / disk.MANIFEST} holds {len(unknown)} tensors that the model "
                f"lacks, such as {unknown[0]}; the checkpoint is of another model, or of another "
                "configuration of it"
            )
        with torch.no_grad():
            for name, tensor in model.items():
                mine = name in self.parameters or name in self.buffers
                if (mine or everything or self._is_unheld(name)) and not tensor.is_meta:
                    tensor.copy_(saved.tensor(f"model/{name}", like=tensor))
        self._without = []
        if self.optimizer is not None:
            disk.restore_optimizer(self.optimizer, self._names(), saved)
            if self.scheduler is not None:
                disk.restore_scheduler(self.scheduler, self.optimizer, saved)


def _refuse_forgotten(module: nn.Module) -> None:
    """Raises TrainingError for a module that another pipeline has kept only its stages of."""
    for name, parameter in module.named_parameters():
        is_one = parameter.numel() > 0 and not any(parameter.stride())
        if is_one and bool(torch.isnan(parameter.detach().flatten()[0])):
            raise TrainingError(
                f"parameter {name} has no values: an earlier pipeline trained this module here and "
                "kept only the stages of its own rank; build the module again, or save a "
                "checkpoint and resume from it"
            )


def _refuse_unsupported(optimizer: object, scheduler: object) -> None:
    """Raises TrainingError for what a step of a pipeline cannot drive."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainingError(
            "LBFGS evaluates the loss several times per step, which a pipeline's step does not; "
            "take an optimizer whose step needs no closure"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TrainingError(
            "ReduceLROnPlateau needs a metric at every step; leave Workload.scheduler out and call "
            "it yourself with what Pipeline.evaluate returns (Pipeline.optimizer is this rank's)"
        )
