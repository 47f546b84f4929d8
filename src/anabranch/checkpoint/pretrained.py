"""Models of Hugging Face within a module, as ``save_pretrained`` would describe them.

A checkpoint has these descriptions, so that an export from it needs neither the module nor the
package transformers.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import nn

from anabranch.files.jsonfile import Strict


class Pretrained(Strict):
    """A ``PreTrainedModel``.

    Attributes:
        prefix: of its tensors' names within the module, such as ``model.``; empty for the module.
        architecture: its class.
        config: what ``config.json`` has.
        generation_config: what ``generation_config.json`` has; None where nothing is generated.
    """

    prefix: str
    architecture: str
    config: str
    generation_config: str | None = None


def pretrained_in(module: nn.Module) -> list[Pretrained]:
    """The outermost ``PreTrainedModel`` on every path from a module."""
    package = sys.modules.get("transformers.modeling_utils")
    if package is None:
        return []  # where it was never imported there is none
    if isinstance(module, package.PreTrainedModel):
        return [_described(module)]
    return [
        inner.model_copy(update={"prefix": f"{name}.{inner.prefix}"})
        for name, child in module.named_children()
        for inner in pretrained_in(child)
    ]


def _described(model: Any) -> Pretrained:
    config = copy.deepcopy(model.config)
    architecture = type(model).__name__
    config.architectures = [architecture]
    config.dtype = str(model.dtype).removeprefix("torch.")
    generation = model.generation_config.to_json_string() if model.can_generate() else None
    return Pretrained(
        prefix="",
        architecture=architecture,
        config=config.to_json_string(),
        generation_config=generation,
    )
