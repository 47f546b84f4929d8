"""Families of models that take packed patches: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and their kind.

A slot holds the patches of one image, padded. A mask keeps attention inside *segments*, which are
images, frames or windows; padding patches attend only to each other. Positions, windows and
interpolation come from the library's own functions, relative to the image.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import DataError
from anabranch.graph.module_state import with_attributes
from anabranch.multimodal.slots import AllowedSizes, Inputs, Slots, sufficient_size, take_rows

_SIZES = "image_grid_thw"
_SPLIT: Any = torch.split


@dataclass(frozen=True)
class PackedPatches:
    """Models with patches ``[patches of all images, values]`` and ``image_grid_thw``; attention may
    be inside of windows, positions may be interpolated.
    """

    token = "image_token_id"
    names = ("pixel_values", _SIZES)

    def example(self, config: Any) -> dict[str, Tensor]:
        vision, merge = config.vision_config, config.vision_config.spatial_merge_size
        channels = getattr(vision, "in_channels", None) or vision.num_channels
        width = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        grids = torch.tensor([[1, merge, merge]])
        return {"pixel_values": torch.zeros(merge**2, width), _SIZES: grids}

    def inputs(self, model: Any, batch: Mapping[str, Tensor], size: AllowedSizes) -> Inputs:
        """Return the images, each with positions and segments of its patches."""
        visual, pixels = _visual(model), batch["pixel_values"]
        grids, unit = self._grids(model, batch), visual.spatial_merge_size**2
        lengths = grids.prod(-1).tolist()
        needed = sufficient_size(max(lengths, default=0), size, "patches in an image", "patches")
        length = needed + -needed % unit
        parts = [
            {"pixel_values": values, **self._image(visual, grid[None])}
            for values, grid in zip(torch.split(pixels, lengths), grids, strict=True)
        ]
        rows = [part.pop("rows") for part in parts]
        tensors = {_SIZES: grids}
        for name in parts[0]:
            entries = length // unit if name == "image_window_index" else length
            tensors[name] = torch.stack([_padded(name, part[name], entries) for part in parts])
        return Inputs(tensors, rows, length // unit)

    def _grids(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return frames, height and width of each image, in patches."""
        patches, grids = batch["pixel_values"], batch[_SIZES]
        is_table = grids.dim() == 2 and grids.shape[1] == 3
        if is_table and int(grids.prod(-1).sum()) == len(patches):
            return grids
        count = f", which is {int(grids.prod(-1).sum())} patches" if is_table else ""
        raise DataError(
            f"{type(model).__name__} was given pixel_values {[*patches.shape]} with {_SIZES} "
            f"{[*grids.shape]}{count}; {_SIZES} is [images, 3], frames, height and width of each "
            "image in patches, and pixel_values the patches of all images, one after the other"
        )

    def _image(self, visual: Any, grid: Tensor) -> dict[str, Tensor]:
        from transformers import vision_utils

        merge = visual.spatial_merge_size
        unit = merge**2
        result = {
            "image_position_ids": vision_utils.get_vision_position_ids(grid, merge),
            "image_cu_seqlens": _segments(vision_utils.get_vision_cu_seqlens(grid)),
        }
        if _shaped(visual):
            result["image_shapes"] = grid.expand(int(grid.prod()), -1)
        rows = torch.arange(int(grid.prod()) // unit)
        if hasattr(visual, "permute_input_for_window_attn"):
            index, bounds = vision_utils.get_vision_window_index(
                grid, merge, visual.window_size, visual.patch_size
            )
            result["image_window_index"] = index
            result["image_cu_window_seqlens"] = _segments(bounds)
            rows = torch.argsort(index)
        if hasattr(visual, "num_grid_per_side"):
            taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            result |= {"image_interp_indices": taps, "image_interp_weights": weights}
        return result | {"rows": rows}

    def arguments(self, tensors: Mapping[str, Tensor], slots: Slots) -> dict[str, Tensor]:
        grids = slots.filled(tensors[_SIZES])
        pixels = slots.filled(tensors["pixel_values"])
        numbers = torch.arange(pixels.shape[1], device=pixels.device)
        return {_SIZES: grids, "pixel_values": pixels[numbers < grids.prod(-1)[:, None]]}

    def encode(self, model: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Encode the patches of all slots with the library's own forward."""
        visual = _visual(model)
        flat = {
            name: tensor.flatten(0, 1 if "window" in name or "seqlens" in name else 2)
            for name, tensor in tensors.items()
            if name != _SIZES
        }
        pixels = flat.pop("pixel_values").type(visual.dtype)
        grids = torch.zeros(0, 3, dtype=torch.long)
        # The library parts features by image, and joins them again.
        with segmented(visual, flat.pop("image_shapes", None)), with_attributes([UNDIVIDED]):
            return model.model.get_image_features(pixels, grids, return_dict=True, **flat)


def _visual(model: Any) -> Any:
    """Return the module that encodes patches: the one that takes the sizes of images."""
    return next(part for part in model.model.children() if "grid_thw" in _taken(part))


def _taken(module: nn.Module) -> Collection[str]:
    """Return the arguments of a module's forward."""
    return inspect.signature(module.forward).parameters


def _segments(bounds: Tensor) -> Tensor:
    """Return the number of the segment of each patch, from the bounds of segments."""
    lengths = (bounds[1:] - bounds[:-1]).long()
    return torch.arange(len(lengths)).repeat_interleave(lengths.cpu())


def _padded(name: str, value: Tensor, size: int) -> Tensor:
    extra = size - len(value)
    if name == "image_window_index":
        return torch.cat([value, torch.arange(len(value), size)])
    fill = -1 if "seqlens" in name else 0
    return F.pad(value, (*(0, 0) * (value.dim() - 1), 0, extra), value=fill)


def _shaped(visual: nn.Module) -> set[Any]:
    """Return classes of an encoder's parts that take the size of each patch's image."""
    return {type(part) for part in visual.modules() if "image_shapes" in _taken(part)}


def inside(segments: Tensor) -> list[tuple[Any, str, Any]]:
    """Return attributes by which attention of transformers stays inside segments ``[slots,
    patches]``, for tensors that are ``UNDIVIDED``.
    """
    from transformers import AttentionInterface

    mask = segments[:, None, :, None] == segments[:, None, None, :]

    def attend(
        _: Any, *states: Any, scaling: float | None = None, dropout: float = 0.0, **__: Any
    ) -> tuple[Tensor, None]:
        query, key, value = (
            state[0].reshape(state.shape[1], *segments.shape, -1).transpose(0, 1)
            for state in states[:3]
        )
        options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout}
        options["enable_gqa"] = query.shape[1] != key.shape[1]
        result = F.scaled_dot_product_attention(query, key, value, mask, **options)
        return result.transpose(1, 2).flatten(0, 1)[None], None

    return [(AttentionInterface, "get_interface", lambda *_: attend), UNDIVIDED]


def _split(values: Tensor, sizes: Any, dim: int = 0) -> Any:
    return _SPLIT(values, sizes, dim) if isinstance(sizes, int) or sizes else [values]


UNDIVIDED: tuple[Any, str, Any] = (torch, "split", _split)
"""Attribute that makes ``torch.split`` by an empty list of lengths leave a tensor undivided."""


@dataclass(frozen=True)
class _SizesByPatch:
    """Sizes of each patch's image, for code that looks up sizes by image and repeats them."""

    sizes: Any

    def __getitem__(self, index: tuple[Any, int]) -> Tensor:
        column: Tensor = self.sizes[:, index[1]]
        return column.clamp(min=1)  # padding has zeros


@contextmanager
def segmented(encoder: Any, shapes: Tensor | None = None) -> Iterator[None]:
    """Context manager under which attention of an encoder gets segments ``[slots, patches]`` in
    place of bounds, window indices are relative to their slot, and patches stay in the order of
    windows. ``shapes`` are the sizes of each patch's image, ``[slots * patches, 3]``, for encoders
    that interpolate positions themselves.
    """

    def forward(plain: Any) -> Any:
        def attention(
            self: Any, hidden_states: Tensor, cu_seqlens: Tensor, *args: Any, **rest: Any
        ) -> Any:
            bounds = torch.zeros(1, dtype=torch.long)
            with with_attributes(inside(cu_seqlens)):
                return plain(self, hidden_states, bounds, *args, **rest)

        return attention

    def permute(self: Any, values: Tensor, index: Tensor, seq_len: int) -> Tensor:
        units = values.reshape(*index.shape, -1)
        return take_rows(units, index).reshape(seq_len, -1)

    def interpolating(plain: Any) -> Any:
        sizes = _SizesByPatch(shapes)
        return lambda self, values, _, __, *places: plain(self, values, [0], sizes, *places)

    values: list[tuple[Any, str, Any]] = [
        (kind, "forward", forward(kind.forward))
        for kind in {type(part) for part in encoder.modules()}
        if kind.__name__.endswith(("VisionAttention", "AudioAttention"))
    ]
    values += [(kind, "forward", interpolating(kind.forward)) for kind in _shaped(encoder)]
    if hasattr(encoder, "permute_input_for_window_attn"):
        values.append((type(encoder), "permute_input_for_window_attn", permute))
        values.append((torch, "argsort", lambda _: slice(None)))
    with with_attributes(values):
        yield
