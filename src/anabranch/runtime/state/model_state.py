"""Parameters, buffers and optimizer of one rank, and its part of checkpoints.

On the disk everything goes by the model's own names. Each tensor is saved by one rank
(``Holders.owner``), and tensors that no stage reads by rank 0, so a checkpoint has the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.checkpoint import RankPart
from anabranch.checkpoint.manifest import fingerprint, pretrained_in
from anabranch.checkpoint.optimizer import optimizer_part, restore_optimizer, restore_scheduler
from anabranch.checkpoint.plain import PlainWeights
from anabranch.checkpoint.reading import SavedState
from anabranch.device import accelerator
from anabranch.errors import TrainingError, some, warn
from anabranch.graph.slices import view_named, whole_name
from anabranch.runtime.assignment import Assignment
from anabranch.runtime.data_parallel.gradients import same_start, share_first
from anabranch.runtime.data_parallel.shards import replace_parameters
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.ranks.placement import move
from anabranch.runtime.state.initialisation import materialise, meta_names, require_values
from anabranch.runtime.state.optimizer_facts import refuse_unsupported, require_updates
from anabranch.workload import Workload


class ModelState:
    """A rank's parameters, buffers, optimizer and scheduler (None if it has nothing to train).

    Ranks that built the module from another seed get the tensors of rank 0. Those of this rank's
    stages are moved to its device, or made there from ``seed`` where the module is on the meta
    device.

    Attributes:
        shards: name of a cut parameter -> rows of it that this rank's optimizer updates.

    Args:
        goes_on: whether values are to come from ``load``, so that the module's do not count.
        needs_all: whether ``load`` reads the whole model, not only this rank's part.
    """

    def __init__(
        self, assignment: Assignment, mesh: Mesh, seed: int, *, goes_on: bool, needs_all: bool
    ) -> None:
        workload, device = assignment.workload, assignment.device
        captured, holders = assignment.captured, assignment.holders
        self._captured, self._module = captured, (module := workload.module)
        self._holders, self._mesh, self._needs_all = holders, mesh, needs_all
        nothing = {*meta_names(module)}
        if not goes_on:
            _refuse_forgotten(module)
            same_start({n: t for n, t in self._everything().items() if n not in nothing}, mesh)
        held = {name for name in nothing if self._is_held(name)}
        self._without = materialise(module, held, seed=seed, device=device)
        self._changed = {name for name, p in module.named_parameters() if p.requires_grad}
        self._slice()
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in captured.parameters().items()
            if mesh.rank in holders.parameters.get(name, ())
        }
        self.buffers: dict[str, Tensor] = {
            name: buffer
            for name, buffer in module.named_buffers()
            if mesh.rank in holders.buffers.get(name, ())
        }
        for parameter in self.parameters.values():
            if _is_forgotten(parameter):
                parameter.data = torch.empty_like(
                    parameter.data, memory_format=torch.contiguous_format
                )
        for parameter in module.parameters():
            parameter.grad = None  # whatever the user has computed with it
        self._homes = {name: tensor.device for name, tensor in self._everything().items()}
        # Before the optimizer is made, which may look at their device.
        move((*self.parameters.values(), *self.buffers.values()), device)
        if device.type != "cpu":
            # They may be needed once more, for the self-check.
            others = [t for name, t in self._everything().items() if not self._is_held(name)]
            move((t for t in others if t.device == device), torch.device("cpu"))
        self._rows = holders.cut_for(mesh.rank)
        self.shards = {
            name: nn.Parameter(rows.of(self.parameters[name].detach()))
            for name, rows in self._rows.items()
        }
        self.optimizer = self._optimizer(workload)
        self.scheduler = workload.make_scheduler(self.optimizer) if self.optimizer else None
        refuse_unsupported(self.optimizer, self.scheduler)
        if assignment.options.compute.backend is None:  # compiled backwards give whole gradients
            rows = assignment.options.compute.sparse_embeddings
            require_updates(captured.graph, self.optimizer, self.updated, sparse_embeddings=rows)

    def _slice(self) -> None:
        """Make the slices that this rank holds, in memory of their own: fused optimizers take
        parameters, gradients and state to lie alike.
        """
        for name in self._holders.held_by(self._mesh.rank):
            if (whole := whole_name(name)) == name:
                continue
            held = self._module.get_parameter(whole)
            part = view_named(name, held.detach())
            part = part.clone(memory_format=torch.contiguous_format)
            self._captured.slices[name] = nn.Parameter(part, requires_grad=held.requires_grad)

    def _optimizer(self, workload: Workload) -> torch.optim.Optimizer | None:
        """Make the recipe's optimizer for whole parameters, then give it the parts updated here."""
        wholes: dict[str, nn.Parameter] = {}
        parts: defaultdict[nn.Parameter, dict[str, nn.Parameter]] = defaultdict(dict)
        stored = self._names()
        for name, parameter in self.updated.items():
            if not parameter.requires_grad or self._mesh.rank not in self._holders.updaters(name):
                continue
            whole, part_name = whole_name(name), stored[id(parameter)]
            wholes[whole] = self._module.get_parameter(whole)
            if part_name != whole:
                parts[wholes[whole]][part_name] = parameter
        if not wholes:
            return None
        optimizer = workload.make_optimizer(list(wholes.items()))
        replace_parameters(optimizer, parts)
        return optimizer

    @property
    def names(self) -> list[str]:
        return list(self._everything())

    def _everything(self) -> dict[str, Tensor]:
        return dict((*self._module.named_parameters(), *self._module.named_buffers()))

    def _tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers, slices in place of parameters that are cut."""
        return {**self._captured.parameters(), **dict(self._module.named_buffers())}

    def _is_unheld(self, name: str) -> bool:
        held = name in self._holders.parameters or name in self._holders.buffers
        return not held and name not in self._captured.cut

    def _is_held(self, name: str) -> bool:
        """Return True if this rank has values of a tensor; rank 0 has those that no stage reads."""
        held = {whole_name(n) for n in self._holders.held_by(self._mesh.rank)}
        return (
            name in held
            or self._mesh.rank in self._holders.buffers.get(name, ())
            or (self._mesh.rank == 0 and self._is_unheld(name))
        )

    def require_values(self) -> None:
        """Raise a TrainingError where a tensor of this rank has never got values."""
        require_values(self._module, self._without)

    def _saves(self, name: str) -> bool:
        owner = 0 if self._is_unheld(name) else self._holders.owner(name)
        return owner == self._mesh.rank

    def forget_others(self) -> None:
        """Free the memory of other stages' parameters, which read as NaN from then on."""
        for name in self._captured.slices.keys() - self.parameters.keys():
            del self._captured.slices[name]  # it would keep the memory of the whole
        for name, parameter in self._module.named_parameters():
            if name not in self.parameters and not self._is_unheld(name) and not parameter.is_meta:
                nothing = torch.tensor(float("nan") if _may_be_nan(parameter) else 0)
                nothing = nothing.to(dtype=parameter.dtype, device=self._homes[name])
                parameter.data = nothing.expand(parameter.shape)
                parameter.grad = None

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of parameters and of the optimizer's state that are on a device."""
        held = (*self.parameters.values(), *self.optimizer_tensors)
        return sum(tensor.nbytes for tensor in held if tensor.device == device)

    @property
    def optimizer_tensors(self) -> list[Tensor]:
        state = self.optimizer.state.values() if self.optimizer is not None else ()
        return [t for entry in state for t in entry.values() if isinstance(t, Tensor)]

    def forget_training(self) -> None:
        """Free gradients and the optimizer's state, once other ranks have the parts they need."""
        self.forget_gradients()
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def forget_gradients(self) -> None:
        """Free gradients, of whole parameters and of shards."""
        for parameter in (*self.parameters.values(), *self.shards.values()):
            parameter.grad = None

    @property
    def updated(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, shards in place of those that are cut."""
        return {**self.parameters, **self.shards}

    def cut_gradients(self) -> None:
        """Give shards their part of the gradients of whole parameters."""
        for name, rows in self._rows.items():
            whole, shard = self.parameters[name], self.shards[name]
            shard.data = rows.of(whole.data)  # which may have been moved
            shard.grad = None if whole.grad is None else rows.of(whole.grad)
            whole.grad = None

    def share_buffers(self) -> None:
        """Give all replicas of a stage the buffers of the first, such as running means."""
        share_first(self.buffers, self._holders.buffers, self._mesh)

    def warn_without_gradient(self) -> None:
        """Warn of trainable parameters that this rank owns and that no gradient has reached."""
        rank, owner = self._mesh.rank, self._holders.owner
        missing = (n for n, p in self.updated.items() if p.requires_grad and p.grad is None)
        names = [name for name in missing if owner(name) == rank]
        if rank == 0:
            names += self._captured.unused
        if names:
            warn(
                f"no gradient reaches {some(names)}: the loss does not depend on them, so they "
                "stay as they are; set requires_grad to False if that is meant"
            )

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's parameters and shards, as far as there are any."""
        held = (*self.parameters.values(), *self.shards.values())
        return [p.grad for p in held if p.grad is not None]

    def part(
        self,
        further: Mapping[str, Tensor],
        *,
        copies: dict[str, Tensor] | None,
        without: Collection[str] = (),
    ) -> RankPart:
        """Return this rank's part of a checkpoint; all replicas of a stage call it together.

        Args:
            further: more tensors, by keys that end in a parameter's name.
            copies: memory for copies of the tensors, reused by every call and filled once the
                device gets there; None for the tensors themselves.
            without: parameters that are left out.

        Raises:
            TrainingError: if the optimizer has state that cannot be saved.
        """
        self.share_buffers()
        saved = {name: tensor for name, tensor in self._tensors().items() if self._saves(name)}
        left_out = {name: saved.pop(name) for name in without if name in saved}
        tensors = {f"model/{name}": tensor for name, tensor in saved.items()}
        tensors |= {key: t for key, t in further.items() if self._saves(key.partition("/")[2])}
        rest: dict[str, Any] = {"frozen": {n: fingerprint(t) for n, t in left_out.items()}}
        if self._mesh.rank == 0:
            rest["aliases"], rest["transient"] = listed_names(self._module)
            rest["pretrained"] = pretrained_in(self._module)
        if self.optimizer is not None:
            names, held = self._names(), self.updated.items()
            owned = {names[id(p)] for n, p in held if n in self._rows or self._saves(n)}
            own, rest["optimizer"] = optimizer_part(self.optimizer, names, owned)
            tensors |= own
        if self.scheduler is not None:
            rest["scheduler"] = self.scheduler.state_dict()
        if copies is not None:
            for key, tensor in tensors.items():
                if key not in copies or copies[key].shape != tensor.shape:
                    # To pinned memory a device copies while the host goes on.
                    copies[key] = accelerator.host_like(tensor)
                tensors[key] = copies[key].copy_(tensor.detach(), non_blocking=True)
        return RankPart(tensors, **rest)

    @property
    def constants(self) -> list[str]:
        """Names of the parameters with the values that the module came with: neither training, nor
        a forward, nor a file has changed them.
        """
        changed = {*self._captured.graph.stateful, *self._captured.cut, *self._changed}
        named = self._module.named_parameters()
        return [n for n, p in named if not p.requires_grad and n not in changed]

    def _names(self) -> dict[int, str]:
        """Return the names of parameters and shards in checkpoints, by their ``id``."""
        rows = self._rows
        return {id(p): rows[n].name(n) if n in rows else n for n, p in self.updated.items()}

    def load(self, saved: SavedState) -> None:
        """Take over this rank's part of a checkpoint.

        Raises:
            FileFormatError: naming file and key, if it is damaged or of another model.
        """
        with torch.no_grad():
            for name, tensor in self._wanted().items():
                if name in saved.frozen:
                    saved.require_frozen(name, tensor)
                else:
                    tensor.copy_(saved.tensor(f"model/{name}", like=tensor))
                    self._changed.add(whole_name(name))
        self._without = [name for name in self._without if name in saved.frozen]
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, self._names(), saved)
            if self.scheduler is not None:
                restore_scheduler(self.scheduler, self.optimizer, saved)

    def load_weights(self, weights: PlainWeights) -> None:
        """Take over the weights that this rank has; the optimizer begins anew.

        Raises:
            FileFormatError: naming file and tensor, if they are of another model or damaged.
        """
        keys = keys_of(weights, self._module)
        with torch.no_grad():
            for name, tensor in self._wanted().items():
                whole = whole_name(name)
                if whole in keys:
                    like = tensor if whole == name else self._module.get_parameter(whole)
                    tensor.copy_(view_named(name, weights.tensor(keys[whole], like)))
                    self._changed.add(whole)
        self._without = [name for name in self._without if name not in keys]

    def _wanted(self) -> dict[str, Tensor]:
        """Return the tensors to be read from a checkpoint."""
        held = {*self.parameters, *self.buffers}
        return {
            name: tensor
            for name, tensor in {**self._everything(), **self._tensors()}.items()
            if (self._needs_all or name in held or self._is_unheld(name)) and not tensor.is_meta
        }


def require_weights(path: str | Path, module: nn.Module) -> None:
    """Check that plain weights are there and have the tensors of a module; see ``keys_of``."""
    keys_of(PlainWeights(path), module)


def keys_of(weights: PlainWeights, module: nn.Module) -> dict[str, str]:
    """Return name of a tensor of a module -> its name in the weights.

    Raises:
        FileFormatError: if one is missing, or there are others.
    """
    aliases, transient = listed_names(module)
    names = {name: [name] for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for alias, name in aliases.items():
        names[name].append(alias)
    return weights.match(names, transient)


def listed_names(module: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Compare the ``state_dict`` of a module with its parameters and buffers.

    Returns:
        Further names of tensors with several -> their first names, and buffers that are not in it.
    """
    first = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    aliases = {name: first[id(t)] for name, t in every if first[id(t)] != name}
    listed = module.state_dict().keys()
    return aliases, [name for name, _ in every if name not in listed]


def _refuse_forgotten(module: nn.Module) -> None:
    """Raise TrainingError for a module of which another pipeline has kept only its own stages."""
    for name, parameter in module.named_parameters():
        if _is_forgotten(parameter):
            raise TrainingError(
                f"parameter {name} has no values: an earlier pipeline trained this module here and "
                "kept only the stages of its own rank; build the module again, or save a "
                "checkpoint and resume from it"
            )


def _may_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_forgotten(parameter: nn.Parameter) -> bool:
    """True for a tensor that ``ModelState.forget_others`` has left: one number for all elements."""
    if not parameter.numel() or any(parameter.stride()) or parameter.is_meta:
        return False
    if not _may_be_nan(parameter):
        return parameter.numel() > 1
    return bool(torch.isnan(parameter.detach().flatten()[0]))
