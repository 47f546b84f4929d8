"""Captured models that several tests share: Hugging Face's and the built-in ones, small."""

from functools import cache
from typing import Any

import torch

from anabranch import models
from anabranch.graph.capture import Captured, capture
from benchmarks.architectures.models import build, cast

BUILT_IN: dict[str, dict[str, str]] = {
    "mmt": {"layers": "1"},
    "dlrm": {"dense_branches": "3", "sparse_branches": "3", "layers": "2"},
    "candle-uno": {"branches": "3", "layers": "2"},
    "two-branch": {"layers": "2"},
    "transformer": {"layers": "2"},
}
"""Built-in models by name, with options that make them cheap to capture."""


def captured_model(name: str, dtype: torch.dtype = torch.float32) -> tuple[Captured, Any]:
    """A model in layers, captured once in this process, and its batch; leave both as they are."""
    return _captured(name, dtype)


@cache
def _captured(name: str, dtype: torch.dtype) -> tuple[Captured, Any]:
    if name in BUILT_IN:
        workload = models.build(name, preset="small", options=BUILT_IN[name])
        module, batch = workload.module.to(dtype), cast(workload.example, dtype)
    else:
        module, batch = build(name, dtype)
    return capture(module, batch), batch
