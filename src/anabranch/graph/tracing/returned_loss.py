"""Loss and metrics in the output of a user's module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anabranch.errors import CaptureError


def scalars(output: Any) -> dict[str, torch.Tensor]:
    """Return loss and metrics of a module's output; raise CaptureError without a scalar loss."""
    entries = _entries(output)
    loss = entries.get("loss")
    if loss is not None and is_fraction(loss):
        loss = loss[0] / loss[1]
    if not isinstance(loss, torch.Tensor):
        returned = ", ".join(entries) or type(output).__name__
        raise CaptureError(
            f"the module's forward returned no loss, but {returned}; it has to return a scalar "
            "tensor, a tuple (numerator, denominator) of two, an object or mapping with such an "
            "entry named loss, or a tuple of the loss and a mapping of metrics (pass the labels in "
            "the batch)"
        )
    if loss.dim() and all(type(n) is int and n == 1 for n in loss.shape):
        loss = loss.reshape(())  # one entry, which backward() takes as well
    if loss.dim() != 0 or not loss.dtype.is_floating_point:
        sizes = ["samples" if isinstance(n, torch.SymInt) else str(n) for n in loss.shape]
        raise CaptureError(
            f"the loss has shape ({', '.join(sizes)}) and type {loss.dtype}, not that of a scalar; "
            "reduce it to a mean over the samples, for example with loss.mean()"
        )
    metrics = {}
    for name, value in entries.items():  # a loop, which the full analysis understands
        if name != "loss" and (scalar := _scalar(name, value)) is not None:
            metrics[name] = scalar
    return {"loss": loss, **metrics}


def _scalar(name: str, value: Any) -> torch.Tensor | None:
    """Return a metric of a module's output as a scalar tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        is_scalar = value.dim() == 0 and not value.dtype.is_complex
        return (value if value.dtype.is_floating_point else value.float()) if is_scalar else None
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        number: Any = value  # also a symbol, while tracing
        return torch.scalar_tensor(number)
    if hasattr(value, "__float__"):
        raise CaptureError(
            f"the module's forward returned {name} as {type(value).__module__}."
            f"{type(value).__name__}; a metric beside the loss is a scalar tensor, or a number"
        )
    return None


def is_fraction(value: Any) -> bool:
    """Return True for a loss that is a pair of numerator and denominator."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(isinstance(part, torch.Tensor) and part.dim() == 0 for part in value)


def _entries(output: Any) -> dict[str, Any]:
    fields = fields_of(output)
    if isinstance(output, torch.Tensor) or (is_fraction(output) and "loss" not in fields):
        return {"loss": output}
    is_pair = isinstance(output, tuple) and len(output) == 2
    if is_pair and not fields and isinstance(output[1], Mapping):
        loss, metrics = output
        return {**_entries(metrics), "loss": loss}
    if hasattr(output, "items"):
        return {str(name): value for name, value in output.items()}
    return fields or dict(getattr(output, "__dict__", {}))


def fields_of(output: Any) -> dict[str, Any]:
    """Return the fields of a named tuple; none for anything else."""
    return dict(output._asdict()) if hasattr(output, "_asdict") else {}
