"""Loss and gradients of the user's own module in one process, and distances from them.

The batch is cut into the slices that the loss is computed on. Gradients accumulate over them in
order, each loss weighted by its samples, unless it is a sum::

    gradient of the batch  =  sum over slices of  samples in slice / batch size  *  its gradient

``anabranch verify`` and the check before the first step of training both compare with these.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anabranch.data.packed import call_module, plain
from anabranch.device import accelerator
from anabranch.errors import AnabranchError, TrainingError
from anabranch.graph.call_traits import draws
from anabranch.graph.capture import Captured
from anabranch.graph.module_state import in_mode, in_one_process
from anabranch.graph.reverted import unchanged_buffers, unchanged_state, without_gradients
from anabranch.graph.tracing.changed_state import seen_writes
from anabranch.graph.tracing.returned_loss import scalars
from anabranch.graph.user_lines import user_frame
from anabranch.runtime.compute.programs import is_random
from anabranch.runtime.guards.same_batch import copies_digest
from anabranch.runtime.numerics.dropout import chances
from anabranch.runtime.ranks.placement import start_of
from anabranch.workload import Batch

ROUNDING = 1e-4
"""Largest relative difference of losses or gradients that is rounding."""


@dataclass(frozen=True)
class Reference:
    """Loss, metrics and gradients of one step; parameters without gradient are left out."""

    loss: float
    metrics: Mapping[str, float]
    gradients: Mapping[str, Tensor]


def num_samples(batch: Batch) -> int:
    """Return the samples in a batch: the size of dimension 0 of its tensors."""
    return next(int(t.shape[0]) for t in pytree.tree_leaves(plain(batch)) if isinstance(t, Tensor))


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples [start, stop) of a batch."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[start:stop], batch)


def _moved(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on a device, which a forward may change in place."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device, copy=True), batch)


def call(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return loss and metrics of a module on a batch; TrainingError if it fails by itself."""
    try:
        with in_one_process():
            return scalars(call_module(module, batch))
    except (AnabranchError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise TrainingError(
            f"{type(module).__name__} fails in one process too, called with {num_samples(batch)} "
            f"samples of the batch: correct {user_frame(traceback.extract_tb(error.__traceback__))}"
            f", which raised {type(error).__name__}: {error}"
        ) from error


Weights = Callable[[int, int], Mapping[str, float]]
"""(samples of a slice, of the batch) -> weights of the slice's loss and metrics."""


def reference(
    module: nn.Module,
    batch: Batch,
    slices: Sequence[tuple[int, int]],
    weights: Weights | None = None,
) -> Reference:
    """Run the module, where it is, in training mode over slices [start, stop) that tile a batch."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    size, device = num_samples(batch), start_of(module)
    loss, metrics = 0.0, dict[str, float]()
    apart = without_gradients(parameters.values())
    with unchanged_buffers(module), in_mode(module, training=True), apart:
        for start, stop in slices:
            share = (stop - start) / size
            counts = {} if weights is None else weights(stop - start, size)
            weight = counts.get("loss", share)
            results = call(module, _moved(take(batch, start, stop), device))
            value = results.pop("loss")
            torch.autograd.backward(value, torch.full_like(value, weight))
            loss += value.item() * weight
            for name, metric in results.items():
                counted = metric.item() * counts.get(name, share)
                metrics[name] = metrics.get(name, 0.0) + counted
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return Reference(loss, metrics, gradients)


@contextmanager
def same_numbers(module: nn.Module) -> Iterator[None]:
    """Context manager under which a module draws the same numbers; restores torch's own state."""
    device = start_of(module)
    gpus = [device] if accelerator.is_on_accelerator(device) else []
    with torch.random.fork_rng(gpus, device_type=device.type):
        torch.manual_seed(0)
        yield


def require_repeatable(captured: Captured, batch: Batch, first: float) -> tuple[str, ...]:
    """Accept a captured module whose loss for a batch is that of its first call, up to rounding.

    A captured program does the same at every step. A counter, a schedule or random numbers in
    Python are fixed in it when the model is captured, and training goes on as if nothing were
    wrong.

    Args:
        first: the loss of the first call, with the ``same_numbers`` if it draws any.

    Returns:
        A warning about attributes that the forward sets, if it sets any.

    Raises:
        TrainingError: if the loss differs, naming these attributes; or if tensors change unseen.
    """
    module, writes = captured.module, seen_writes(captured.programs.example)
    before = _plain_attributes(module)
    named = (*module.named_parameters(), *module.named_buffers()) if writes is not None else ()
    tensors = {n: tensor for n, tensor in named if n not in (writes or ()) and tensor.numel()}
    with unchanged_state(captured), in_mode(module, training=True), same_numbers(module):
        digests = {name: copies_digest([tensor]) for name, tensor in tensors.items()}
        second = float(call(module, _moved(batch, start_of(module)))["loss"].detach())
        lost = [n for n, tensor in tensors.items() if copies_digest([tensor]) != digests[n]]
    if lost:
        raise TrainingError(
            f"the forward of {type(module).__name__} changes {', '.join(lost[:3])} in a way that "
            "tracing does not see, such as by numpy, so in the captured model it would stay as it "
            "was: change a buffer in place with torch operations (copy_, add_)"
        )
    changed = [
        f"{name} ({before[name]!r}, then {value!r})"
        for name, value in _plain_attributes(module).items()
        if name in before and before[name] != value
    ]
    sets = f"sets {', '.join(changed[:3])}" if changed else ""
    name = type(module).__name__
    if math.isfinite(first) and not abs(first - second) <= ROUNDING * max(abs(first), 1e-3):
        raise TrainingError(
            f"{name} has the loss {first:.9g} for a batch, and {second:.9g} for the same batch at "
            f"its second call{': it ' if sets else ''}{sets}; a counter, a schedule or random "
            "numbers in Python are fixed when the model is captured, so the pipeline would train "
            "something else: keep a count in a buffer (register_buffer) and change that in place, "
            "draw with torch (torch.rand), or pass the number in the batch"
        )
    if not sets:
        return ()
    return (
        f"the forward of {name} {sets}, which made no difference to the loss of a second call; in "
        "the captured model it stays as it was, so if later steps depend on it, keep it in a "
        "buffer",
    )


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    """Numbers, words and switches of a module and its parts by name, which a forward may change."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str) and name != "training"
    }


def draws_random(captured: Captured, dropout: str = "off") -> bool:
    """Return True if a model draws random numbers, which differ from those of one process; disabled
    dropout does not count.
    """
    program = captured.programs.example
    drawing = [node for node in program.calls if draws(node)]
    if dropout == "off":
        drawing = [node for node in drawing if not chances(node)]
    return bool(drawing) or any(map(is_random, program.regions.values()))


def largest_distance(
    gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: Callable[[str], float]
) -> tuple[float, str]:
    """Return the largest distance of two gradients of a parameter, divided by the parameter's
    scale, and the parameter. A missing gradient counts as zero, as that of an expert to which no
    sample is sent.
    """
    worst, largest = "", 0.0
    for name in sorted({*gradients, *expected}):
        both = [tensors[name] for tensors in (gradients, expected) if name in tensors]
        difference = both[0] - both[1] if len(both) == 2 else both[0]
        distance = float(difference.abs().max()) if difference.numel() else 0.0
        if distance:
            distance = distance / scale(name) if scale(name) else math.inf
        if not worst or not distance <= largest:
            worst, largest = name, distance
    return largest, worst
