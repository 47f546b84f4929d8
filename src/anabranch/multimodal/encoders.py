"""Encoders of a vision-language model of transformers, chosen by the arguments of its methods."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anabranch.errors import DataError
from anabranch.graph.module_state import on_meta, with_attributes
from anabranch.multimodal.patches import PackedPatches
from anabranch.multimodal.sounds import Sounds
from anabranch.multimodal.towers import Packed, Tiled, VisionTower

Encoder = VisionTower | PackedPatches | Sounds

_KINDS: tuple[tuple[str, Encoder], ...] = (
    ("image_grid_thw", PackedPatches()),
    ("batch_num_images", Packed()),
    ("pixel_attention_mask", Tiled()),
    ("pixel_values", VisionTower()),
)
"""Argument of ``get_image_features`` -> encoder; the first argument that there is decides."""

_ENCODERS: WeakKeyDictionary[nn.Module, dict[str, Encoder]] = WeakKeyDictionary()
"""Model -> its encoders, each of which has run once on the meta device."""


def encoders_of(model: nn.Module) -> Mapping[str, Encoder]:
    """Encoders of images and sounds, in the order in which a model takes them.

    Raises:
        DataError: for a model that does not take encoded features, whose images come with further
            arguments, or whose encoder cannot be run on slots.
    """
    if model not in _ENCODERS:
        found = _chosen(model)
        for encoder in found.values():
            try:
                _encode_one(model, encoder)
            except DataError:
                raise
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                raise _unknown(model, f"its encoder does not take slots: {text}") from error
        _ENCODERS[model] = found
    return _ENCODERS[model]


def arguments(model: Any, part: str) -> Mapping[str, inspect.Parameter]:
    """Arguments of the method that encodes images or sounds; none where a model has no such."""
    method = getattr(getattr(model, "model", None), f"get_{part}_features", None)
    return {} if method is None else inspect.signature(method).parameters


def _chosen(model: nn.Module) -> dict[str, Encoder]:
    given = arguments(model, "image")
    if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters or not given:
        why = "it takes no images as mm_encoder_outputs, as models of transformers 5.23 do"
        raise _unknown(model, why)
    encoder = next(encoder for argument, encoder in _KINDS if argument in given)
    empty = inspect.Parameter.empty
    required = [
        name for name, argument in given.items() if argument.default is empty and argument.kind < 2
    ]
    if others := [name for name in required if name not in encoder.names]:
        raise _unknown(model, f"its images come with {', '.join(others)}")
    tower: Any = getattr(model.model, "audio_tower", None)
    chunks = hasattr(sys.modules[type(tower).__module__], "chunk_and_pad_features")
    if chunks and hasattr(tower, "conv1"):
        return {"audio": Sounds(), "image": encoder}
    return {"image": encoder}


def _encode_one(model: nn.Module, encoder: Encoder) -> None:
    bare = on_meta(model)
    dtype = next(bare.parameters()).dtype
    inputs = encoder.inputs(model, encoder.one(model.config), None)

    def slot(tensor: Tensor) -> Tensor:
        one = tensor[None].to("meta")
        return one.to(dtype) if tensor.is_floating_point() else one

    # Tensors on the meta device have no truth.
    with torch.no_grad(), with_attributes([(torch.Tensor, "__bool__", lambda _: False)]):
        encoder.encode(bare, {name: slot(tensor) for name, tensor in inputs.tensors.items()})


def _unknown(model: nn.Module, why: str) -> DataError:
    return DataError(
        f"multimodal_batch does not know {type(model).__name__} ({why}); give the patches or "
        "images of each sample in a dimension of their own, or Workload rows={...}, see "
        "docs/multimodal.md"
    )
