"""One training step, operator by operator, for measuring and for estimating.

Every operator runs forward on the real outputs of the operators before it, then backward on the
real gradients of the operators after it. Between operators a value is detached and becomes a leaf,
whose ``grad`` collects the gradients of its readers, as at the border of a stage::

    forward    op 0 --x--> | leaf x | --> op 1 --y--> | leaf y | --> loss
    backward   op 0 <-- x.grad      <--   op 1 <-- y.grad       <--
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from anabranch.errors import CaptureError, warn
from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import StageProgram, split
from anabranch.profile.operator_bytes import BytesObserver

Call = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]


def operator_programs(
    captured: Captured, samples: int, device: torch.device | None = None
) -> list[StageProgram]:
    """Return one program per operator, in order, on ``device`` (by default the parameters')."""
    cut = split(captured, [[op.name] for op in captured.graph.ops])
    return [cut.program(i, samples, device=device) for i in range(len(captured.graph))]


def workable_counts(
    captured: Captured, counts: Sequence[int], device: torch.device | None = None
) -> list[int]:
    """Return ascending sample counts, without small ones that fail, as with batch normalisation.

    Raises:
        CaptureError: if fewer than two of several counts would be left.
    """
    failure: CaptureError | None = None
    for i, count in enumerate(counts):
        try:
            captured.programs.at(count, device=device)
        except CaptureError as error:
            failure = failure or error
            continue
        if failure is None:
            return list(counts)
        if len(counts) - i < 2:
            raise failure
        cause = str(failure.__cause__ or failure).partition("\n")[0]
        warn(
            f"{type(captured.module).__name__} fails with {', '.join(map(str, counts[:i]))} "
            f"sample{'s' if counts[i - 1] > 1 else ''} ({cause}), so it is measured with {count} "
            "or more, and no device is planned to get fewer"
        )
        return list(counts[i:])
    assert failure is not None
    raise failure


def example_batch(captured: Captured, samples: int, device: torch.device) -> dict[str, Tensor]:
    """Return the example batch of the capture, repeated or cut to a number of samples. Statistics
    of the whole example go with it: its tensors may name samples that a part does not have.
    """
    layout = captured.layout
    example = zip(layout.names, layout.resized(layout.samples, device), strict=True)
    whole = captured.programs.with_statistics(dict(example))
    rows = torch.arange(samples, device=device) % layout.samples
    return {name: tensor[rows] for name, tensor in whole.items()}


def likeness(captured: Captured, step: StageProgram, batch: Mapping[str, Tensor]) -> str:
    """Return a text that is equal for operators with equal operations, shapes and gradients."""
    graph: fx.Graph = step.module.graph
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    state = step.module.state_dict(keep_vars=True)
    values = captured.graph.values
    lines = [f"{step.shapes[port.value]} {values[port.value].grad}" for port in step.inputs]
    lines += [f"{batch[name].dtype} {batch[name].shape}" for name in step.batch]
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        what: object = node.target
        if node.op == "placeholder":
            what = ""
        elif node.op == "get_attr" and node.target in state:
            tensor = state[node.target]
            what = tensor.dtype, tuple(tensor.shape), tensor.requires_grad
        lines.append(f"{node.op} {what} {args}")
    return "\n".join(lines)


def run_operators(
    program: Sequence[StageProgram], batch: Mapping[str, Tensor], call: Call, nbytes: BytesObserver
) -> None:
    """Run all operators forward, then backward; ``call`` maps operator and inputs to outputs.

    ``nbytes`` observes every pass, and the outputs of every forward."""
    leaves: dict[int, Tensor] = {}
    to_do: list[tuple[list[Tensor], list[Tensor | None]]] = []
    for op, step in enumerate(program):
        inputs = [leaves[port.value] for port in step.inputs]
        inputs += [batch[name] for name in step.batch]
        with nbytes.forward(op):
            results = call(op, inputs)
        nbytes.made(op, results)
        # Several ports may carry one value; its gradient arrives once, at the leaf.
        made = {port.value: t for port, t in zip(step.outputs, results, strict=False)}
        leaves |= {v: t.detach().requires_grad_(t.requires_grad) for v, t in made.items()}
        differentiable = [(t, leaves[v]) for v, t in made.items() if t.requires_grad]
        roots = [t for t, _ in differentiable]
        targets: list[Tensor | None] = [leaf for _, leaf in differentiable]
        if step.has_loss and (loss := results[len(step.outputs)]).requires_grad:
            roots.append(loss)
            targets.append(None)
        to_do.append((roots, targets))
        del results, made, differentiable
    while to_do:
        roots, targets = to_do.pop()
        grads = [leaf if leaf is None else leaf.grad for leaf in targets]
        reached = [
            (root, grad)
            for root, grad, leaf in zip(roots, grads, targets, strict=True)
            if grad is not None or leaf is None
        ]
        if reached:
            arrived = [grad for _, grad in reached if grad is not None]
            with nbytes.backward(len(to_do), arrived):
                torch.autograd.backward([t for t, _ in reached], [grad for _, grad in reached])
