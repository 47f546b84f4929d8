"""Where weights are predicted to go, against the optimizers' own steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from anabranch.runtime.asynchronous.prediction import WeightPrediction
from anabranch.runtime.state.optimizer_facts import rule_of

Make = Callable[[Any], Optimizer]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=dtype)) for size in (3, 4)]


def step(optimizer: Optimizer, ps: list[nn.Parameter], seed: int) -> None:
    """One step on random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    optimizer.step()


def predicted(
    optimizer: Optimizer, ps: list[nn.Parameter], ahead: int, **options: Any
) -> list[Tensor]:
    weights = [p.detach().clone() for p in ps]
    WeightPrediction(optimizer, ps).move(weights, ahead, **options)
    return weights


REPEATED = {
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "decay in the gradient": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "ascent": partial(SGD, lr=0.1, momentum=0.9, maximize=True),
    "adam": partial(Adam, lr=0.1),
    "adam with decay": partial(Adam, lr=0.1, weight_decay=0.1),
    "adam ascending": partial(Adam, lr=0.1, maximize=True),
    "amsgrad": partial(Adam, lr=0.1, amsgrad=True),
    "adamw without decay": partial(AdamW, lr=0.1, weight_decay=0),
    "fused": partial(AdamW, lr=0.1, weight_decay=0, fused=True),
    "fused sgd": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "one by one": partial(Adam, lr=0.1, foreach=False),
    "betas by group": lambda ps: Adam(
        [{"params": ps[:1]}, {"params": ps[1:], "betas": (0.5, 0.7)}], lr=0.1
    ),
    "complex": partial(Adam, lr=0.1),
}


@pytest.mark.parametrize("name", sorted(REPEATED))
def test_one_step_ahead_repeats_the_last_step(name):
    """dW is the last step applied: one step of prediction moves as far as the last update did, and
    three steps three times as far. Steps of complex weights are those of both parts.
    """
    ps = parameters(torch.complex128 if name == "complex" else torch.float64)
    optimizer = REPEATED[name](ps)
    for seed in range(5):
        before = [p.detach().clone() for p in ps]
        step(optimizer, ps, seed)
        for ahead in (1, 3):
            for old, now, then in zip(before, ps, predicted(optimizer, ps, ahead), strict=True):
                torch.testing.assert_close(then - now.detach(), ahead * (now.detach() - old))


def test_adamw_decay_stays_outside():
    """The decay moves weights beside the step, so the prediction is that of AdamW without it on the
    same gradients.
    """
    ps, qs = parameters(), parameters()
    plain, decayed = AdamW(ps, lr=0.1, weight_decay=0), AdamW(qs, lr=0.1, weight_decay=0.3)
    for seed in range(3):
        step(plain, ps, seed)
        step(decayed, qs, seed)
    for p, q, a, b in zip(ps, qs, predicted(plain, ps, 2), predicted(decayed, qs, 2), strict=True):
        torch.testing.assert_close(a - p.detach(), b - q.detach())
        assert not torch.equal(p, q)


def test_nesterov_moves_by_its_buffer():
    """Its step has a part of one mini-batch's gradient, which is no prediction of the next."""
    ps = parameters()
    optimizer = SGD(ps, lr=0.1, momentum=0.9, nesterov=True)
    step(optimizer, ps, 0)
    step(optimizer, ps, 1)
    for p, then in zip(ps, predicted(optimizer, ps, 2), strict=True):
        torch.testing.assert_close(then, p - 0.1 * 2 * optimizer.state[p]["momentum_buffer"])


def test_any_other_optimizer_repeats_its_last_update():
    """``W_t - W_{t-1}`` times s, whatever made it; nothing before the first update."""
    ps = parameters()
    optimizer = RMSprop(ps, lr=0.1)
    assert all(map(torch.equal, predicted(optimizer, ps, 2), ps))
    before = [p.detach().clone() for p in ps]
    step(optimizer, ps, 0)
    last = [old - p.detach() for old, p in zip(before, ps, strict=True)]
    for old, p, then in zip(before, ps, predicted(optimizer, ps, 2, last=last), strict=True):
        torch.testing.assert_close(then, p + 2 * (p - old))


def test_a_subclass_is_any_other_optimizer():
    """What it does in its step is unknown."""

    class Own(SGD):
        pass

    assert rule_of(Own(parameters(), lr=0.1, momentum=0.9)) == "last update"
    assert rule_of(AdamW(parameters())) == "adam"
    assert rule_of(NAdam(parameters())) == "last update"


@pytest.mark.parametrize(
    ("make", "steps"), [(partial(SGD, momentum=0.9), 0), (Adam, 0), (partial(SGD, momentum=0), 1)]
)
def test_without_state_nothing_moves(make, steps):
    """Before the first step, and of SGD without momentum, which keeps nothing to predict with."""
    ps = parameters()
    optimizer = make(ps, lr=0.1)
    for seed in range(steps):
        step(optimizer, ps, seed)
    assert all(map(torch.equal, predicted(optimizer, ps, 3), ps))


@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), Adam])
def test_groups_have_rates_of_their_own(make):
    """A prediction uses the rate that the scheduler has left for the update to come."""
    ps = parameters()
    optimizer = make([{"params": ps[:1], "lr": 0.1}, {"params": ps[1:], "lr": 0.4}])
    step(optimizer, ps, 0)
    usual = predicted(optimizer, ps, 1)
    optimizer.param_groups[1]["lr"] = 0.8
    faster = predicted(optimizer, ps, 1)
    assert torch.equal(usual[0], faster[0])
    torch.testing.assert_close(faster[1] - ps[1].detach(), 2 * (usual[1] - ps[1].detach()))


@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), partial(Adam, foreach=False)])
def test_a_rate_may_be_a_tensor(make):
    """It predicts like the number that it holds."""
    ps, qs = parameters(), parameters()
    first, second = make(ps, lr=torch.tensor(0.125)), make(qs, lr=0.125)
    for each, of in ((first, ps), (second, qs)):
        step(each, of, 0)
        step(each, of, 1)
    for a, b in zip(predicted(first, ps, 2), predicted(second, qs, 2), strict=True):
        torch.testing.assert_close(a, b)


def test_state_on_a_device_is_not_read_back(monkeypatch):
    """Where step counts live on a device (fused, capturable) all is computed there, to the same
    result up to the rounding of ``1 - beta ** step`` in single precision.
    """
    ps = parameters()
    optimizer = Adam(ps, lr=0.1)
    for seed in range(3):
        step(optimizer, ps, seed)
    usual = predicted(optimizer, ps, 2)
    monkeypatch.setattr(
        "anabranch.runtime.asynchronous.prediction._on_device",
        lambda number: isinstance(number, Tensor),
    )
    for a, b in zip(usual, predicted(optimizer, ps, 2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    sgd = SGD(ps, lr=torch.tensor(0.1), momentum=0.9)
    step(sgd, ps, 0)
    for p, then in zip(ps, predicted(sgd, ps, 2), strict=True):
        torch.testing.assert_close(then, p - 0.2 * sgd.state[p]["momentum_buffer"])
