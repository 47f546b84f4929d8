"""Muon for the matrices of a model, beside Adam for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Muon, Optimizer

from anabranch.workload import NamedParameters


class MuonAdam(Optimizer):
    """Muon for matrices, whose steps get the size of Adam's, and Adam for all other parameters.

    Args:
        parameters: with their names, as an optimizer recipe gets them, or without.
        lr: learning rate of both.
        adam: parts of the names of matrices that are left to Adam: embeddings, and the last layer.
        momentum: momentum of Muon; ``betas`` are Adam's.
        weight_decay: weight decay of both, decoupled from the gradient.
    """

    def __init__(
        self,
        parameters: NamedParameters | Iterable[nn.Parameter],
        lr: float = 1e-3,
        *,
        adam: Sequence[str] = ("embed", "head"),
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for entry in parameters:
            name, parameter = entry if isinstance(entry, tuple) else ("", entry)
            is_muons = parameter.dim() == 2 and not any(part in name for part in adam)
            groups[is_muons].append(parameter)
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        options: dict[bool, dict[str, Any]] = {
            True: both | {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"},
            False: both | {"betas": betas, "decoupled_weight_decay": True},
        }
        kinds: dict[bool, Callable[..., Optimizer]] = {True: Muon, False: Adam}
        self._parts = [kinds[k](part, **options[k]) for k, part in groups.items() if part]
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make both steps; groups and state may have been loaded since."""
        for part in self._parts:
            part.state = self.state
            kind = "ns_steps" if isinstance(part, Muon) else "amsgrad"
            part.param_groups = [group for group in self.param_groups if kind in group]
            part.step()
