"""Runs the programs of a split one after the other in one process, as ranks would together."""

import copy
import itertools
import random
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from anabranch.graph.capture import Captured
from anabranch.graph.cutting.gradient_order import fold
from anabranch.graph.cutting.split import Port, Split, split
from anabranch.graph.opgraph import OpGraph


def random_stages(graph: OpGraph, count: int, seed: int) -> list[list[str]]:
    """Cut a graph into stages that are convex and in topological order, but not ranges of that
    order.

    A random topological order is drawn that likes to stay on one branch, and cut at random places.
    """
    rng = random.Random(seed)
    waiting = {i: graph.predecessors[i].bit_count() for i in range(len(graph))}
    ready = [i for i, n in waiting.items() if n == 0]
    order: list[int] = []
    while ready:
        chosen = ready.pop(rng.choice([-1, -1, rng.randrange(len(ready))]))
        order.append(chosen)
        for i in range(len(graph)):
            if graph.successors[chosen] >> i & 1:
                waiting[i] -= 1
                if waiting[i] == 0:
                    ready.append(i)
    cuts = [0, *sorted(rng.sample(range(1, len(graph)), min(count, len(graph)) - 1)), len(graph)]
    return [[graph.ops[i].name for i in sorted(order[a:b])] for a, b in itertools.pairwise(cuts)]


def run_stages(
    parts: Split, batch: Any, *, backward: bool = True, rows: slice = slice(None)
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Forward through all stages, backward in reverse; returns the loss and the metrics.

    What crosses is detached and contiguous, as if it had been sent. Gradients end in the
    parameters. Only some ``rows`` of the batch are run.
    """
    captured = parts.captured
    leaves = captured.programs.with_statistics(captured.layout.flatten(batch))
    leaves = {name: leaf[rows] for name, leaf in leaves.items()}
    samples = next(iter(leaves.values())).shape[0]
    programs = [parts.program(s, samples) for s in range(parts.num_stages)]
    parameters = dict(captured.module.named_parameters())
    sent: dict[Port, torch.Tensor] = {}
    entered: list[dict[Port, torch.Tensor]] = []
    left: list[dict[Port, torch.Tensor]] = []
    tied: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    loss, metrics = None, {}
    for program in programs:
        given = {p: sent[p].detach().contiguous().clone() for p in program.inputs}
        for port, value in given.items():
            assert (value.shape, value.dtype) == program.shapes[port.value]
            value.requires_grad_(port.grad and backward)
        aliases = [parameters[use.name].detach().requires_grad_() for use in program.tied]
        for use, alias in zip(program.tied, aliases, strict=True):
            tied[use.name][use.order] = alias
        with torch.set_grad_enabled(backward):
            out = program.module(*given.values(), *aliases, *(leaves[n] for n in program.batch))
        sent.update(zip(program.outputs, out, strict=False))
        entered.append(given)
        left.append(dict(zip(program.outputs, out, strict=False)))
        rest = list(out[len(program.outputs) :])
        if program.has_loss:
            loss = rest.pop(0)
        metrics.update(zip(program.metrics, rest, strict=True))
    assert loss is not None
    if backward:
        _backward(programs, entered, left, loss)
        for name, uses in tied.items():
            parameters[name].grad = fold(tuple(uses[k].grad for k in sorted(uses)))
    return loss.detach(), metrics


def _backward(programs: Any, entered: Any, left: Any, loss: torch.Tensor) -> None:
    grads: dict[Port, torch.Tensor] = {}
    for program, given, out in reversed(list(zip(programs, entered, left, strict=True))):
        back = {port: value for port, value in out.items() if port.grad}
        roots = list(back.values()) + ([loss] if program.has_loss else [])
        weights = [grads[port] for port in back] + ([None] if program.has_loss else [])
        if roots:
            torch.autograd.backward(roots, weights)
        for port, value in given.items():
            if port.grad:
                assert value.grad is not None, port
                grads[port] = value.grad.contiguous().clone()


def eager(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Loss and gradients of the module itself; its gradients are cleared before and after."""
    module.zero_grad(set_to_none=True)
    loss = loss_of(module, batch)
    loss.backward()
    return loss.detach(), taken(module)


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of the module itself."""
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    out = module(**batch) if isinstance(batch, dict) else module(*batch)
    return out if isinstance(out, torch.Tensor) else out["loss"]


def taken(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of a module, which are cleared."""
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return grads


def gradient_error(
    got: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> float:
    """Largest difference relative to the largest entry of the same gradient; infinite where one is
    missing.

    Entries below a thousandth of the largest gradient are rounding noise, such as that of the bias
    of attention keys, whose gradient is zero on paper; they are taken relative to that thousandth.
    """
    worst = 0.0
    floor = max(float(g.abs().max()) for g in expected.values() if g is not None) * 1e-3
    for name, want in expected.items():
        have = got[name]
        if want is None or have is None:
            missing = want if have is None else have
            worst = max(worst, 0.0 if missing is None or not missing.any() else float("inf"))
        elif not torch.equal(have, want):
            worst = max(worst, float((have - want).abs().max() / want.abs().max().clamp_min(floor)))
    return worst


def check_split(captured: Captured, batch: Any, stages: list[list[str]], *, exact: bool) -> float:
    """Gradient error of the stages, run one after the other, against the module itself."""
    state = copy.deepcopy(dict(captured.module.named_buffers()))
    torch.manual_seed(0)
    want_loss, want = eager(captured.module, batch)
    updated = copy.deepcopy(dict(captured.module.named_buffers()))
    with torch.no_grad():
        for name, buffer in captured.module.named_buffers():
            buffer.copy_(state[name])
    torch.manual_seed(0)
    loss, _ = run_stages(split(captured, stages, exact=exact), batch)
    got = taken(captured.module)
    for name, buffer in captured.module.named_buffers():
        torch.testing.assert_close(
            buffer, updated[name], rtol=0 if exact else None, atol=0 if exact else None
        )
    if exact:
        assert torch.equal(loss, want_loss)
    else:
        torch.testing.assert_close(loss, want_loss)
    return gradient_error(got, want)
