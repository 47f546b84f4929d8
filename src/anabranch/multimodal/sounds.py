"""The sounds of Qwen2.5-Omni: a slot holds the chunks of one sound, padded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anabranch.multimodal.patches import segmented
from anabranch.multimodal.slots import AllowedSizes, Inputs, Slots, sufficient_size, take_rows


@dataclass(frozen=True)
class Sounds:
    """Models with ``input_features [sounds, mel, frames]`` and their mask."""

    token = "audio_token_id"
    names = ("input_features", "feature_attention_mask")

    def example(self, config: Any) -> dict[str, Tensor]:
        audio = config.audio_config
        features = torch.zeros(1, audio.num_mel_bins, 2 * audio.n_window)
        return {"input_features": features, "feature_attention_mask": features[:, 0].long() + 1}

    def inputs(self, model: Any, batch: Mapping[str, Tensor], size: AllowedSizes) -> Inputs:
        """Return the sounds in chunks, with the pair of positions whose mean each token takes."""
        tower = model.model.audio_tower
        file, window = sys.modules[type(tower).__module__], tower.n_window
        lengths = batch["feature_attention_mask"].sum(1)
        needed = -(-int(lengths.max()) // (2 * window))
        chunks = sufficient_size(needed, size, "chunks in a sound", "chunks")
        columns: dict[str, list[Tensor]] = {"features": [], "lengths": [], "segments": []}
        columns["pairs"], rows = [], []
        for features, length in zip(batch["input_features"], lengths, strict=True):
            parts, sizes = file.chunk_and_pad_features(features[:, :length], length[None], window)
            more = chunks - len(sizes)
            columns["features"].append(
                F.pad(parts, (0, 2 * window - parts.shape[2], 0, 0, 0, more))
            )
            columns["lengths"].append(F.pad(sizes, (0, more)))
            after = (columns["lengths"][-1] - 1) // 2 + 1
            is_valid = torch.arange(window) < after[:, None]
            numbers = torch.arange(chunks)[:, None].expand(-1, window)
            columns["segments"].append(numbers.where(is_valid, -1).flatten())
            valid = is_valid.flatten().nonzero()[:, 0]
            pairs = valid[: len(valid) // 2 * 2].view(-1, 2)
            columns["pairs"].append(F.pad(pairs, (0, 0, 0, chunks * window // 2 - len(pairs))))
            rows.append(torch.arange(len(pairs)))
        tensors = {f"audio_{name}": torch.stack(parts) for name, parts in columns.items()}
        return Inputs(tensors, rows, chunks * window // 2)

    def arguments(self, tensors: Mapping[str, Tensor], slots: Slots) -> dict[str, Tensor]:
        lengths = slots.filled(tensors["audio_lengths"]).sum(1)
        features = slots.filled(tensors["audio_features"]).transpose(1, 2).flatten(2, 3)
        numbers = torch.arange(features.shape[2], device=features.device)
        return {
            "input_features": features,
            "feature_attention_mask": (numbers < lengths[:, None]).long(),
        }

    def encode(self, model: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Encode the chunks of all slots with the library's own layers."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        tower = model.model.audio_tower
        features = tensors["audio_features"].flatten(0, 2).type(tower.conv1.weight.dtype)
        lengths = tensors["audio_lengths"].flatten()
        numbers = torch.arange(features.shape[2], device=features.device)
        mask = (numbers < lengths[:, None])[:, None].to(features.dtype)
        hidden = F.gelu(tower.conv1(features)) * mask
        hidden = F.gelu(tower.conv2(hidden)).transpose(1, 2)
        positions = tower.positional_embedding.positional_embedding[: hidden.shape[1]]
        hidden = (hidden + positions.to(hidden.dtype)).flatten(0, 1)
        segments = tensors["audio_segments"].flatten(0, 1)
        with segmented(tower):
            for layer in tower.layers:
                (hidden,) = layer(hidden, cu_seqlens=segments)
        slots = hidden.unflatten(0, segments.shape)
        pairs = tensors["audio_pairs"].flatten(0, 1)
        first, second = (take_rows(slots, pairs[..., side]) for side in (0, 1))
        features = tower.proj(tower.ln_post((first + second) / 2)).flatten(0, 1)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=features)
