"""Gradients between the backwards and the update: summed over their holders, clipped, checked.

A parameter is held by every replica of a stage, and by every stage that reads it (tied). All copies
start equal and get the same sum, so they stay equal; no copy is special. Each micro-batch's loss is
weighted by its samples, so a sum is right where replicas have unequal shares::

    stage 0 (devices 0, 1)   embedding, layer 0         embedding is held by ranks {0, 1, 2},
    stage 1 (device 2)       layer 1, embedding         layer 0 by {0, 1}, layer 1 by {2}
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from anabranch.cost.memory import deal
from anabranch.device import accelerator
from anabranch.graph.cutting.split import Split
from anabranch.graph.slices import whole_name
from anabranch.plans.stages import StageGraph
from anabranch.runtime.data_parallel.buckets import entries
from anabranch.runtime.data_parallel.shards import Shard, Shards, shards_of
from anabranch.runtime.guards.same_batch import copies_digest
from anabranch.runtime.ranks.mesh import Mesh, Ranks


@dataclass(frozen=True)
class Holders:
    """Replica groups of parameters and buffers; the same on every rank.

    Attributes:
        parameters: name -> ranks, ascending.
        buffers: name -> ranks, ascending.
        stages: parameter -> stages that read it, ascending.
        shards: trainable parameter -> its shards, each updated by one rank, which alone has its
            optimizer state; without parameters whose state all holders have (see ``sharded``).
    """

    parameters: Mapping[str, Ranks]
    buffers: Mapping[str, Ranks]
    stages: Mapping[str, tuple[int, ...]]
    shards: Mapping[str, Shards] = field(default_factory=dict)

    def sharded(self, trainable: Mapping[str, Tensor], *, cut: bool) -> Holders:
        """Return holders with the optimizer state of each parameter on one of them (ZeRO,
        Rajbhandari et al. 2020, stage 1), or with rows of it on several. ``deal`` distributes the
        parameters that the same ranks hold.

        Args:
            trainable: the trainable parameters, in the model's order.
            cut: whether parameters may be cut; an optimizer that looks at whole ones needs them.
        """
        groups: dict[Ranks, list[str]] = defaultdict(list)
        for name in reversed(list(trainable)):
            if len(self.parameters.get(name, ())) > 1:
                groups[self.parameters[name]].append(name)
        shards: dict[str, Shards] = {}
        for ranks, names in groups.items():
            dealt = deal([trainable[name].nbytes for name in names], len(ranks), cut=cut)
            for name, shares in zip(names, dealt, strict=True):
                on_ranks = [(ranks[replica], nbytes) for replica, nbytes in shares]
                shards[name] = shards_of(trainable[name], on_ranks)
        return replace(self, shards=shards)

    @staticmethod
    def of(split: Split, graph: StageGraph) -> Holders:
        """Return the replica groups of a stage graph."""
        parameters: dict[str, set[int]] = defaultdict(set)
        buffers: dict[str, set[int]] = defaultdict(set)
        stages: dict[str, set[int]] = defaultdict(set)
        for s, stage in enumerate(graph.stages):
            ranks = {graph.rank_of[device] for device in stage.devices}
            for name in split.parameters(s):
                parameters[name] |= ranks
                stages[name].add(s)
            for name in split.buffers(s):
                buffers[name] |= ranks
        return Holders(_ascending(parameters), _ascending(buffers), _ascending(stages))

    @property
    def sets(self) -> set[Ranks]:
        """Replica groups of several ranks."""
        return {r for r in (*self.parameters.values(), *self.buffers.values()) if len(r) > 1}

    def resident_bytes(
        self, parameters: Mapping[str, Tensor], rank: int, device: torch.device
    ) -> tuple[int, int]:
        """Return bytes of a rank's own parameters on its device, and of other stages' there."""
        own = others = 0
        for name, parameter in parameters.items():
            if parameter.device == device and name in self.parameters:
                if rank in self.parameters[name]:
                    own += parameter.nbytes
                else:
                    others += parameter.nbytes
        return own, others

    def readers(self, key: str, num_ranks: int) -> Ranks:
        """Return the ranks that need a tensor of a checkpoint, such as ``model/text.0.weight``."""
        kind, _, name = key.partition("/")
        if kind != "model":
            name = name.partition("/")[2]
        # Another plan may have cut the whole parameter otherwise.
        held = [n for n in self.parameters if whole_name(n) == whole_name(name)]
        if kind != "model":
            return tuple(sorted({rank for n in held for rank in self.updaters(n)}))
        everyone = tuple(range(num_ranks))  # for tensors that no stage reads
        ranks = {rank for n in held for rank in self.parameters[n]}
        return tuple(sorted(ranks)) or self.buffers.get(name) or everyone

    def owner(self, name: str) -> int:
        """Return the rank that counts or saves a parameter or buffer."""
        return self.buffers[name][0] if name in self.buffers else self.updaters(name)[0]

    def held_by(self, rank: int) -> set[str]:
        """Return the parameters of a rank."""
        return {name for name, ranks in self.parameters.items() if rank in ranks}

    def updaters(self, name: str) -> Ranks:
        """Return the ranks that have optimizer state of a trainable parameter."""
        shards = self.shards.get(name)
        return tuple(shard.rank for shard in shards) if shards else self.parameters[name]

    @cached_property
    def cut(self) -> dict[str, Shards]:
        """The parameters of several shards."""
        return {name: shards for name, shards in self.shards.items() if len(shards) > 1}

    def cut_for(self, rank: int) -> dict[str, Shard]:
        """Return the shards of cut parameters that a rank updates."""
        return {
            n: shard for n, shards in self.cut.items() for shard in shards if shard.rank == rank
        }


def _ascending(ranks_of: Mapping[str, set[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(sorted(numbers)) for name, numbers in ranks_of.items()}


def same_start(tensors: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Give every rank the tensors of rank 0 where models were built from other seeds."""
    if mesh.size == 1 or not tensors:
        return
    gathered = mesh.gather([copies_digest([tensor]) for tensor in tensors.values()])
    for tensor, digests in zip(tensors.values(), zip(*gathered, strict=True), strict=True):
        if len(set(digests)) > 1:
            _share(tensor, 0, None, mesh)


def share_first(tensors: Mapping[str, Tensor], holders: Mapping[str, Ranks], mesh: Mesh) -> None:
    """Give every holder of a tensor the values of its first one."""
    for name in sorted(tensors, key=lambda name: (holders[name], name)):
        if len(ranks := holders[name]) > 1:
            _share(tensors[name], ranks[0], ranks, mesh)


def _share(tensor: Tensor, source: int, ranks: Ranks | None, mesh: Mesh) -> None:
    value = tensor.detach().contiguous()
    mesh.broadcast(value, source, ranks)
    with torch.no_grad():
        tensor.copy_(value)


def sum_of_squares(
    parameters: Mapping[str, nn.Parameter], holders: Holders, rank: int
) -> list[Tensor]:
    """Return ``squares_of`` the gradients that this rank owns, each counted once over the ranks."""
    gradients = gradients_of(parameters).items()
    return squares_of([g for n, g in gradients if n in holders.cut or holders.owner(n) == rank])


def squares_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the squared norm of some gradients, in a list that is empty without any."""
    if not gradients:
        return []
    precise = accelerator.widest_float(gradients[0].device)
    norms = torch._foreach_norm([entries(g) for g in gradients], 2.0, precise)
    return [torch.stack(norms).square().sum()]


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def divide(parameters: Mapping[str, nn.Parameter], count: int) -> None:
    if count > 1 and (gradients := gradients_of(parameters)):
        torch._foreach_div_(list(gradients.values()), count)


def clip(parameters: Mapping[str, nn.Parameter], squares: float, largest: float) -> None:
    """Scale gradients as ``torch.nn.utils.clip_grad_norm_`` does, given the sum over all ranks."""
    factor = largest / (math.sqrt(squares) + 1e-6)
    if (factor < 1.0 or math.isnan(factor)) and (gradients := gradients_of(parameters)):
        torch._foreach_mul_(list(gradients.values()), factor)
