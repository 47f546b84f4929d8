"""Muon beside Adam: each parameter as under torch's own, in one optimizer that can be resumed."""

import copy

import torch
from torch import nn
from torch.optim import Adam, Muon
from torch.optim.lr_scheduler import StepLR

from anabranch.runtime.state.muon import MuonAdam


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def learn(net: nn.Sequential, *optimizers: torch.optim.Optimizer, seed: int) -> None:
    words = torch.randint(5, (8,), generator=torch.Generator().manual_seed(seed))
    net(words).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_each_parameter_is_as_under_torchs_own():
    """Matrices but the embedding and the head, which is told by name, are Muon's."""
    net, twin = model(), model()
    named = [(name.replace("0.", "embed.").replace("3.", "head."), p) for name, p in
             net.named_parameters()]  # fmt: skip
    ours = MuonAdam(named, lr=0.1, weight_decay=0.2)
    hidden = twin[1].weight
    rest = [p for p in twin.parameters() if p is not hidden]
    muon = Muon([hidden], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    adam = Adam(rest, lr=0.1, weight_decay=0.2, decoupled_weight_decay=True)
    for seed in range(3):
        learn(net, ours, seed=seed)
        learn(twin, muon, adam, seed=seed)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_resumed_one_goes_on():
    """From its state dict, at the rate of a schedule; also where a stage has no matrix."""
    for part in (slice(0, 4), slice(2, 3)):
        net = model()
        optimizer = MuonAdam(net[part].named_parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        learn(net, optimizer, seed=0)
        scheduler.step()
        twin = copy.deepcopy(net)
        other = MuonAdam(twin[part].named_parameters(), lr=0.7)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        learn(net, optimizer, seed=1)
        learn(twin, other, seed=1)
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
