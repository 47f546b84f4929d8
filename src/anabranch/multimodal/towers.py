"""Families whose images go through a tower singly: LLaVA, PaliGemma, InternVL, Idefics3, Gemma3.

Slots without an image hold zeros. No token reads their features, so they only take time.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from anabranch.errors import DataError
from anabranch.graph.module_state import on_meta, with_attributes
from anabranch.multimodal.patches import UNDIVIDED, inside
from anabranch.multimodal.slots import AllowedSizes, Inputs, Slots, sufficient_size

_FEATURES: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = WeakKeyDictionary()
"""Model -> {shape of an image: number of its features}."""


@dataclass(frozen=True)
class VisionTower:
    """Models with images ``[images, 3, height, width]``."""

    token = "image_token_id"
    names: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def example(self, config: Any) -> dict[str, Tensor]:
        """Return a batch with one image."""
        size = _pair(config.vision_config.image_size)
        one = {"pixel_values": torch.ones(1, 3, *size), "image_sizes": torch.tensor([size])}
        return {name: one[name] for name in self.names if name in one}

    def inputs(self, model: Any, batch: Mapping[str, Tensor], size: AllowedSizes) -> Inputs:
        """Return the images of a batch, with the rows of their features."""
        pixels = batch["pixel_values"]
        count = self.features(model, tuple(pixels.shape[1:]))
        rows = torch.arange(count)
        return Inputs({"pixel_values": pixels}, [rows] * len(pixels), count)

    def features(self, model: nn.Module, shape: tuple[int, ...]) -> int:
        """Count features of an image ``[3, height, width]`` or of tiles, by the model on meta."""
        known = _FEATURES.setdefault(model, {})
        if shape not in known:
            bare: Any = on_meta(model)
            pixels = torch.empty(1, 1, *shape, dtype=next(bare.parameters()).dtype, device="meta")
            with torch.no_grad():
                parts = tree_leaves(self.encode(bare, {"pixel_values": pixels}).pooler_output)
            known[shape] = sum(math.prod(part.shape[:-1]) for part in parts)
        return known[shape]

    def arguments(self, tensors: Mapping[str, Tensor], slots: Slots) -> dict[str, Tensor]:
        """Return the images without empty slots, as arguments of the unchanged model."""
        return {name: slots.filled(tensors[name]) for name in self.names if name in tensors}

    def encode(self, model: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Encode all slots with the library's own code. Its ``list(features)`` splits features by
        image before they are joined again; here they stay in one piece.
        """
        with with_attributes([(_file_of(model), "list", _in_one_piece)]):
            return model.model.get_image_features(
                tensors["pixel_values"].flatten(0, 1), return_dict=True
            )


@dataclass(frozen=True)
class Idefics(VisionTower):
    """Idefics3, SmolVLM: images ``[samples, images, 3, height, width]``, some of them empty."""

    names = ("pixel_values", "pixel_attention_mask")

    def example(self, config: Any) -> dict[str, Tensor]:
        return {"pixel_values": super().example(config)["pixel_values"][None]}

    def inputs(self, model: Any, batch: Mapping[str, Tensor], size: AllowedSizes) -> Inputs:
        """Return the images that are not empty, and their number in each sample."""
        pixels = batch["pixel_values"]
        is_real = (pixels != 0).flatten(2).any(2)
        config, side = model.config, pixels.shape[-1]
        count = (side // config.vision_config.patch_size) ** 2 // config.scale_factor**2
        tensors = {"pixel_values": pixels[is_real]}
        if "pixel_attention_mask" in batch:
            tensors["pixel_attention_mask"] = batch["pixel_attention_mask"][is_real].bool()
        rows = [torch.arange(count)] * int(is_real.sum())
        return Inputs(tensors, rows, count, per_sample=is_real.sum(1).tolist())

    def arguments(self, tensors: Mapping[str, Tensor], slots: Slots) -> dict[str, Tensor]:
        """Return the images with as many slots as the sample with most images has."""
        own = replace(slots, share=1)
        most_images = int(slots.counts.max())
        return {name: own.put(slots.filled(t), most_images) for name, t in tensors.items()}

    def encode(self, model: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Encode all slots, without the library's search for images that are not empty."""
        pixels, inner = tensors["pixel_values"].flatten(0, 1), model.model
        size = model.config.vision_config.patch_size
        mask = tensors.get("pixel_attention_mask")
        if mask is not None:
            # An empty slot attends to itself, as a softmax needs an entry.
            mask = (mask | ~mask.flatten(2).any(2)[..., None, None]).flatten(0, 1)
            parts = mask.reshape(len(mask), mask.shape[1] // size, size, -1, size)
            mask = parts.any(4).any(2)
        outputs = inner.vision_model(
            pixel_values=pixels, patch_attention_mask=mask, return_dict=True
        )
        features = inner.connector(outputs.last_hidden_state)
        outputs.pooler_output = [features.flatten(0, 1)]
        return outputs


@dataclass(frozen=True)
class LlavaNext(VisionTower):
    """LLaVA-NeXT and LLaVA-OneVision: images ``[images, tiles, 3, height, width]``. Their features
    are arranged by the size of the whole image, with a learned line break between rows.
    """

    names = ("pixel_values", "image_sizes", "batch_num_images")

    def example(self, config: Any) -> dict[str, Tensor]:
        one = super().example(config)
        return {**one, "pixel_values": one["pixel_values"][None]}

    def inputs(self, model: Any, batch: Mapping[str, Tensor], size: AllowedSizes) -> Inputs:
        """Return the images, with rows as the library's own code arranges them."""
        pixels, sizes = batch["pixel_values"], batch["image_sizes"]
        config, vision = model.config, model.config.vision_config
        count = self.features(model, (1, *pixels.shape[2:])) - 1  # and a line break
        module = _file_of(model)
        numbers = batch.get("batch_num_images")
        per_sample = None if numbers is None else [int(number) for number in numbers]
        alone = [True] * len(sizes)
        if per_sample is not None:
            alone = [number == 1 for number in per_sample for _ in range(number)]
        tiles = [
            module.image_size_to_num_patches(size, config.image_grid_pinpoints, vision.image_size)
            if is_alone
            else 1
            for size, is_alone in zip(sizes, alone, strict=True)
        ]
        slot_tiles = sufficient_size(max(tiles, default=1), size, "tiles in an image", "patches")
        rows = []
        with torch.no_grad():
            for image, (number, pixel_size) in enumerate(zip(tiles, sizes, strict=True)):
                index = torch.arange(number * count, dtype=torch.float64)
                rows.append(_arranged(model, index.view(number, count, 1), pixel_size, image))
        pixels = F.pad(pixels, (0, 0, 0, 0, 0, 0, 0, slot_tiles - pixels.shape[1]))
        tensors = {"pixel_values": pixels, "image_sizes": sizes}
        return Inputs(tensors, rows, slot_tiles * count, per_sample=per_sample)

    def arguments(self, tensors: Mapping[str, Tensor], slots: Slots) -> dict[str, Tensor]:
        own = super().arguments(tensors, slots)
        return own | ({"batch_num_images": slots.counts} if slots.is_counted else {})

    def encode(self, model: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Encode the tiles of all slots; rows are arranged later, when tokens take them."""
        inner, pixels = model.model, tensors["pixel_values"]
        samples, sizes = pixels.shape[0], torch.zeros(0, 2, dtype=torch.long)
        unpacked = (type(inner), "pack_image_features", lambda _, parts, *__, **___: (parts, None))
        with with_attributes([unpacked, UNDIVIDED]):
            outputs = inner.get_image_features(pixels.flatten(0, 2), sizes, return_dict=True)
        (features,) = outputs.pooler_output
        rows = features.reshape(samples, -1, features.shape[-1])
        newline = inner.image_newline.expand(samples, 1, -1).to(rows)
        outputs.pooler_output = [torch.cat([rows, newline], dim=1).flatten(0, 1)]
        return outputs


@dataclass(frozen=True)
class Pixtral(VisionTower):
    """Mistral3, LightOnOCR: images ``[images, 3, height, width]``, padded beyond ``image_sizes``.
    Pixtral's tower encodes the patches of all images in one sequence.
    """

    names = ("pixel_values", "image_sizes")

    def inputs(self, model: Any, batch: Mapping[str, Tensor], size: AllowedSizes) -> Inputs:
        """Return the images, with segments that separate their patches from padding."""
        pixels, sizes = batch["pixel_values"], torch.as_tensor(batch["image_sizes"])
        patch, merge = _patch_sizes(model)
        height, width = (side // patch for side in pixels.shape[2:])
        features = torch.arange((height // merge) * (width // merge)).view(-1, width // merge)
        rows, segments = [], []
        for tall, wide in (sizes // patch).tolist():
            rows.append(features[: tall // merge, : wide // merge].flatten())
            segment = torch.full((height, width), -1)
            segment[:tall, :wide] = 0
            segments.append(segment.flatten())
        tensors = {"pixel_values": pixels, "image_sizes": sizes}
        return Inputs(tensors | {"image_segments": torch.stack(segments)}, rows, features.numel())

    def encode(self, model: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Encode all slots in one sequence, each as an image with its padding, with the library's
        own code; attention stays inside segments.
        """
        pixels, inner = tensors["pixel_values"].flatten(0, 1), model.model
        patch, merge = _patch_sizes(model)
        size = tuple(pixels.shape[2:])
        tower: Any = pixtral_tower(model)
        rotary = type(tower.patch_positional_embedding)
        plain = rotary.forward

        def positions(*arguments: Any) -> tuple[Tensor, ...]:
            parts = plain(*arguments)
            return tuple(p.expand(len(pixels), *p.shape).flatten(0, 1) for p in parts)

        def merged(self: Any, features: Tensor, _: Any) -> Any:
            rows = features.view(-1, *(side // patch for side in size), features.shape[-1])
            squares = F.unfold(rows.permute(0, 3, 1, 2), merge, stride=merge)
            return self.merging_layer(squares.mT.flatten(0, 1))

        rules = [
            (_file_of(tower), "zip", lambda patches, _: [(patches.transpose(0, 1), size)]),
            (_file_of(tower), "generate_block_attention_mask", lambda *_: None),
            (rotary, "forward", positions),
            (torch, "as_tensor", lambda sizes, **_: sizes),  # no copy of sizes to the device
            *inside(tensors["image_segments"].flatten(0, 1)),
        ]
        mergers = {type(part) for part in inner.modules() if hasattr(part, "merging_layer")}
        rules += [(kind, "forward", merged) for kind in mergers]
        sizes = torch.zeros(0, 2, dtype=torch.long)
        with with_attributes(rules):
            return inner.get_image_features(pixels, image_sizes=sizes, return_dict=True)


def pixtral_tower(model: Any) -> nn.Module | None:
    """Return the tower that encodes the patches of all images in one sequence, if there is one."""
    parts = model.model.children()
    return next((part for part in parts if hasattr(part, "patch_positional_embedding")), None)


def _patch_sizes(model: Any) -> tuple[int, int]:
    """Return the pixels along a patch, and the patches along a feature."""
    return model.config.vision_config.patch_size, getattr(model.config, "spatial_merge_size", 1)


def _pair(size: Any) -> tuple[int, int]:
    """Return height and width of a size, which may be one number for both."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


def _file_of(model: nn.Module) -> Any:
    """Return the Python module that defines a model's class."""
    return sys.modules[type(model).__module__]


def _in_one_piece(values: Any) -> list[Any]:
    return [values.flatten(0, 1)] if isinstance(values, Tensor) else list(values)


def _arranged(model: Any, index: Tensor, size: Tensor, image: int) -> Tensor:
    """Return the rows that an image's tokens take; -1 for the line break."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise DataError(
            f"image {image} of {size.tolist()} pixels has more tiles than "
            f"{model.config.vision_aspect_ratio} allows, so the model interpolates its features; "
            "make the image smaller before the processor, or allow fewer sizes "
            "(image_grid_pinpoints)"
        )

    pack, config = model.model.pack_image_features, model.config
    names = ("vision_aspect_ratio", "vision_feature_select_strategy")
    options = {n: getattr(config, n) for n in names if n in inspect.signature(pack).parameters}
    with with_attributes([(F, "interpolate", refuse)]):
        newline = torch.tensor([-1.0], dtype=index.dtype)
        (rows,), _ = pack([index], size[None], image_newline=newline, **options)
    taken: Tensor = rows[:, 0].long()
    return taken
