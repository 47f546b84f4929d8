"""The JSON document of a checkpoint, with a checksum of itself."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from anabranch.files.jsonfile import Strict


class Pretrained(Strict):
    """A ``PreTrainedModel``.

    Attributes:
        prefix: prefix of its tensors' names in the module, such as ``model.``; may be empty.
        architecture: name of its class.
        config: content of ``config.json``.
        generation_config: content of ``generation_config.json``; None if it cannot generate.
        adapter: name of the adapter that peft has put into it; or empty.
        adapter_config: content of peft's ``adapter_config.json``; None except for one LoRA adapter.
    """

    prefix: str
    architecture: str
    config: str
    generation_config: str | None = None
    adapter: str = ""
    adapter_config: str | None = None


def pretrained_in(module: nn.Module) -> list[Pretrained]:
    """Describe the outermost ``PreTrainedModel`` on every path from a module."""
    package = sys.modules.get("transformers.modeling_utils")
    if package is None:
        return []  # transformers was never imported
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
        **_adapter(getattr(model, "peft_config", None)),
    )


def _adapter(configs: Any) -> dict[str, Any]:
    """Return the adapter fields of ``Pretrained``, from the configurations of peft in a model."""
    if not isinstance(configs, Mapping) or not configs:
        return {}
    name, config = next(iter(configs.items()))
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    # These have other names in peft's files than in the model.
    has_tokens = bool(fields.get("trainable_token_indices"))
    if len(configs) > 1 or fields.get("peft_type") != "LORA" or has_tokens:
        return {"adapter": name}
    text = json.dumps({**fields, "inference_mode": True}, default=sorted, indent=2)
    return {"adapter": name, "adapter_config": text}


SCHEMA = "anabranch.checkpoint/1"
MANIFEST = "manifest.json"

Scalar = bool | int | float | str | None
Option = Scalar | list[Scalar]
"""Value of an option of a parameter group, such as ``lr`` and ``betas``."""

_Count = Annotated[int, Field(ge=0, le=2**62)]
_Position = Annotated[int, Field(ge=0, le=2**40)]
"""Steps, epochs, batches or samples: a million steps a second for twelve days."""
_FileName = Annotated[str, Field(pattern=r"^rank-\d{1,6}\.safetensors$")]
_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TensorEntry(Strict):
    """File, shape and type of a tensor."""

    file: _FileName
    shape: list[_Count]
    dtype: str


class Group(Strict):
    """One parameter group of an optimizer: its options, and the names of its parameters."""

    options: dict[str, Option]
    parameters: list[str]


class OptimizerState(Strict):
    """State of an optimizer besides tensors."""

    kind: str
    groups: list[Group]
    scalars: dict[str, dict[str, Scalar]]


class Description(Strict):
    """A state without tensors and progress, in types of JSON; of one rank, or of all together.

    Attributes:
        optimizer: state of the optimizer besides tensors; None if nothing was trained.
        scheduler: state of the scheduler, if there was one.
        aliases: further name of a tensor -> its first name.
        transient: names of buffers that are not in the model's ``state_dict``.
        pretrained: models of Hugging Face in it.
        frozen: parameters that were not trained and are left out -> their ``fingerprint``.
    """

    optimizer: OptimizerState | None = None
    scheduler: dict[str, Any] | None = None
    aliases: dict[str, str] = Field(default_factory=dict)
    transient: list[str] = Field(default_factory=list)
    pretrained: list[Pretrained] = Field(default_factory=list)
    frozen: dict[str, int] = Field(default_factory=dict)


class Progress(Strict):
    """Position of training.

    Attributes:
        position: batches done of the epoch.
        loss_scale: scale of the loss under fp16, and ``loss_streak`` its steps without overflow.
        data: ``state_dict`` of a loader that has one.
        batch_size: samples of a batch, and ``accumulate`` batches of an update; 0 if not known.
    """

    step: _Position = 0
    epoch: _Position = 0
    position: _Position = 0
    seed: _Count = 0
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    loss_streak: _Position = 0
    data: dict[str, Any] | None = None
    batch_size: _Position = 0
    accumulate: _Position = 0


class Manifest(Description, Progress):
    """The document ``manifest.json``.

    Attributes:
        id: random id of the checkpoint, which the other files have as well.
        files: bytes of each file.
        checksums: SHA-256 of each file.
        checksum: SHA-256 of everything else in this document, as ``checksum_of`` computes it.
    """

    schema_: Literal["anabranch.checkpoint/1"] = Field(alias="schema")
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    files: dict[_FileName, _Count]
    checksums: dict[_FileName, _Checksum]
    tensors: dict[str, TensorEntry]
    checksum: _Checksum


def fingerprint(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's numbers, read as integers: the same on every device."""
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    flat = tensor.detach().contiguous().flatten()
    integers = flat.view(as_integers.get(flat.element_size(), torch.int64))
    return int(integers.sum(dtype=torch.int64))


def checksum_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its checksum, as JSON with sorted keys."""
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**document, "checksum": checksum_of(document)}


def file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in manifests: ``float32``."""
    return str(dtype).removeprefix("torch.")


def type_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return type and shape for messages, such as ``float32[3, 8]``."""
    return f"{dtype_name(dtype)}{list(shape)}"
