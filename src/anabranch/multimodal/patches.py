"""Families of models that take packed patches: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and their kind.

A slot holds the patches of one image, padded. Attention is inside of *segments*, which are images,
frames or windows, by a mask; patches that are padding see each other alone. Positions, windows and
interpolation come from the library's own functions, relative to the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anabranch.errors import DataError
from anabranch.graph.module_state import with_attributes
from anabranch.multimodal.slots import Inputs, Sizes, Slots, most

_SIZES = "image_grid_thw"


@dataclass(frozen=True)
class PackedPatches:
    """Models with patches ``[patches of all images, values]`` and ``image_grid_thw``.

    Attributes:
        has_windows: whether attention is inside of windows in most layers.
        has_table: whether positions are interpolated from a table.
    """

    token = "image_token_id"
    names = ("pixel_values", _SIZES)
    has_windows: bool = False
    has_table: bool = False

    def one(self, config: Any) -> dict[str, Tensor]:
        """A batch with one image."""
        vision, merge = config.vision_config, config.vision_config.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grids = torch.tensor([[1, merge, merge]])
        return {"pixel_values": torch.zeros(merge**2, width), _SIZES: grids}

    def inputs(self, model: Any, batch: Mapping[str, Tensor], size: Sizes) -> Inputs:
        """The images, each with positions and segments of its patches."""
        visual, pixels = model.model.visual, batch["pixel_values"]
        grids, unit = self._grids(model, batch), visual.spatial_merge_size**2
        lengths = grids.prod(-1).tolist()
        needed = most(max(lengths, default=0), size, "patches in an image", "patches")
        length = needed + -needed % unit
        parts = [self._image(visual, grid[None]) for grid in grids]
        rows = [part.pop("rows") for part in parts]
        entries = {
            "pixel_values": torch.split(pixels, lengths),
            **{name: [part[name] for part in parts] for name in (parts[0] if parts else ())},
        }
        tensors = {_SIZES: grids}
        for name, values in entries.items():
            entries_each = length // unit if name == "image_window_index" else length
            tensors[name] = torch.stack([_padded(name, v, entries_each) for v in values])
        return Inputs(tensors, rows, length // unit)

    def _grids(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Frames, height and width of each image, in patches."""
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
            "image_segments": _segments(vision_utils.get_vision_cu_seqlens(grid)),
        }
        rows = torch.arange(int(grid.prod()) // unit)
        if self.has_windows:
            index, bounds = vision_utils.get_vision_window_index(
                grid, merge, visual.window_size, visual.patch_size
            )
            result["image_window_index"] = index
            result["image_window_segments"] = _segments(bounds)
            rows = torch.argsort(index)
        if self.has_table:
            taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            result |= {"image_interp_indices": taps, "image_interp_weights": weights}
        return result | {"rows": rows}

    def own(self, tensors: Mapping[str, Tensor], slots: Slots) -> dict[str, Tensor]:
        """The model's own arguments."""
        grids = slots.filled(tensors[_SIZES])
        pixels = slots.filled(tensors["pixel_values"])
        numbers = torch.arange(pixels.shape[1], device=pixels.device)
        return {_SIZES: grids, "pixel_values": pixels[numbers < grids.prod(-1)[:, None]]}

    def encode(self, model: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Encode the patches of all slots with the library's own forward."""
        visual = model.model.visual
        flat = {
            name.removeprefix("image_"): tensor.flatten(0, 1)
            for name, tensor in tensors.items()
            if name.startswith("image_") and name not in (_SIZES, "image_index")
        }
        segments = flat.pop("segments")
        arguments = {n: tensor.flatten(0, 1) for n, tensor in flat.items() if "window" not in n}
        if self.has_windows:
            arguments["window_index"] = flat["window_index"]
            arguments["cu_window_seqlens"] = flat["window_segments"]
        pixels = tensors["pixel_values"].flatten(0, 2).type(visual.dtype)
        with segmented(visual):
            outputs = visual(
                pixels, grid_thw=None, cu_seqlens=segments, return_dict=True, **arguments
            )
        outputs.pooler_output = [outputs.pooler_output]
        if hasattr(outputs, "deepstack_features"):
            outputs.deepstack_features = [[part] for part in outputs.deepstack_features]
        return outputs


def _segments(bounds: Tensor) -> Tensor:
    """The number of the segment of each patch, by the bounds of segments."""
    lengths = (bounds[1:] - bounds[:-1]).long()
    return torch.arange(len(lengths)).repeat_interleave(lengths.cpu())


def _padded(name: str, value: Tensor, size: int) -> Tensor:
    extra = size - len(value)
    if name == "image_window_index":
        return torch.cat([value, torch.arange(len(value), size)])
    fill = -1 if "segments" in name else 0
    return F.pad(value, (*(0, 0) * (value.dim() - 1), 0, extra), value=fill)


@contextmanager
def segmented(encoder: Any) -> Iterator[None]:
    """Inside, attention of an encoder is given segments ``[slots, patches]`` in place of bounds,
    windows are indices relative to their slot, and nothing is put back into order after them.
    """
    from transformers.exporters import exporter_dynamo

    attend = F.scaled_dot_product_attention

    def forward(
        self: Any, hidden_states: Tensor, cu_seqlens: Tensor, max_seqlen: Any = None, **rest: Any
    ) -> Any:
        mask = cu_seqlens[:, None, :, None] == cu_seqlens[:, None, None, :]
        # As many segments as slots, all of one length: what the library's own patch is for.
        bounds = torch.empty(cu_seqlens.shape[0] + 1, dtype=torch.long, device="meta")
        with with_attributes(
            [(F, "scaled_dot_product_attention", partial(attend, attn_mask=mask))]
        ):
            return exporter_dynamo._reshaped_vision_attention_forward(
                self, hidden_states, cu_seqlens=bounds, **rest
            )

    def permute(self: Any, values: Tensor, index: Tensor, seq_len: int) -> Tensor:
        units = values.reshape(*index.shape, -1)
        chosen = units.gather(1, index[..., None].expand(-1, -1, units.shape[-1]))
        return chosen.reshape(seq_len, -1)

    values: list[tuple[Any, str, Any]] = [
        (kind, "forward", forward)
        for kind in {type(part) for part in encoder.modules()}
        if kind.__name__.endswith(("VisionAttention", "AudioAttention"))
    ]
    values.append((exporter_dynamo, "torch_compilable_check", lambda *_, **__: None))
    if hasattr(encoder, "permute_input_for_window_attn"):
        values.append((type(encoder), "permute_input_for_window_attn", permute))
        values.append((torch, "argsort", lambda _: slice(None)))
    with with_attributes(values):
        yield
