"""Batches of vision-language models, and the calls of these models that can be cut by samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.data.packed import PackedBatch
from anabranch.errors import DataError
from anabranch.graph.library_rules import replaced
from anabranch.multimodal.patches import Patches
from anabranch.multimodal.slots import Sizes, Slots, feature_rows, most, shared_out
from anabranch.multimodal.sounds import Sounds
from anabranch.multimodal.towers import Packed, Tiled, Tower

Encoder = Tower | Patches | Sounds

FAMILIES: Mapping[str, Mapping[str, Encoder]] = {
    "llava": {"image": Tower()},
    "gemma3": {"image": Tower()},
    "llava_onevision": {"image": Packed()},
    "idefics3": {"image": Tiled()},
    "smolvlm": {"image": Tiled()},
    "qwen2_vl": {"image": Patches()},
    "qwen2_5_vl": {"image": Patches(has_windows=True)},
    "qwen3_vl": {"image": Patches(has_table=True)},
    "qwen2_5_omni_thinker": {"audio": Sounds(), "image": Patches(has_windows=True)},
}
"""``model_type`` of a configuration of transformers -> how its inputs are encoded, in the order in
which the model takes them."""


def multimodal_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    images: Sizes = None,
    patches: Sizes = None,
    sounds: Sizes = None,
    chunks: Sizes = None,
) -> PackedBatch:
    """A batch of a vision-language model of transformers that can be cut by samples.

    Call it where batches are made, on what the model's processor gives, with ``labels``. The batch
    is then what a ``Workload`` takes as example and as data. Every sample gets the same number of
    slots for images; slots that it does not fill hold zeros that nothing reads.

    Args:
        model: of a class in the table of ``docs/multimodal.md``; its weights are not used.
        batch: as the model itself takes it.
        images: slots of a sample, or the numbers of slots that the workload has buckets for, of
            which the least that will do is taken; by default as many as the batch needs.
        patches: likewise the patches of a slot, for models that take packed patches, and its tiles,
            for LLaVA-OneVision.
        sounds, chunks: likewise for sounds.

    Raises:
        DataError: if the model's class is not known; or a sample has other numbers of placeholder
            tokens than of features, which would move into the next sample.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in FAMILIES:
        raise DataError(
            f"multimodal_batch does not know {type(model).__name__} ({kind}); it knows "
            f"{', '.join(FAMILIES)} of transformers. Give the patches or images of each sample in "
            "a dimension of their own, or Workload rows={...}, see docs/multimodal.md"
        )
    own: dict[str, Any] = dict(batch)
    if "pixel_values_videos" in own:
        raise DataError("multimodal_batch takes images; give a video as images, one per frame")
    sizes = {"image": (images, patches), "audio": (sounds, chunks)}
    tensors: dict[str, Tensor] = {}
    parts: list[tuple[str, tuple[str, ...]]] = []
    given = {
        name: own.pop(name) for e in FAMILIES[kind].values() for name in e.names if name in own
    }
    for modality, encoder in FAMILIES[kind].items():
        is_here = encoder.names[0] in given
        if not is_here and sizes[modality][0] is None:
            continue
        found = encoder.inputs(model, given if is_here else encoder.one(config), sizes[modality][1])
        if not is_here:
            none = {name: tensor[:0] for name, tensor in found.tensors.items()}
            found = replace(found, tensors=none, rows=(), per_sample=None)
        is_token = own["input_ids"] == getattr(config, encoder.token)
        counts = shared_out(is_token.sum(1).tolist(), found, modality)
        slots = most(max(counts), sizes[modality][0], f"{modality} inputs", f"{modality}s")
        for name, tensor in found.tensors.items():
            tensors[name] = Slots.put(tensor, counts, slots)
        tensors[f"{modality}_counts"] = torch.tensor(counts)
        extra = isinstance(encoder, Packed)
        tensors[f"{modality}_index"] = feature_rows(is_token, found, counts, slots, extra)
        parts.append((modality, tuple(found.tensors)))
    has_grids = any(isinstance(encoder, Patches) for encoder in FAMILIES[kind].values())
    made = "position_ids" not in own and has_grids
    if made:
        own["position_ids"] = _positions(model, own, given)
    if has_grids:
        own["position_ids"] = own["position_ids"].movedim(1, 0)
    packing = Multimodal(kind, tuple(parts), made, "batch_num_images" in given)
    return PackedBatch(own | tensors, packing)


def _positions(model: Any, own: dict[str, Tensor], given: Mapping[str, Tensor]) -> Tensor:
    """Positions of the tokens, of which those of an image have three, by the library's function."""
    tokens = own["input_ids"]
    options: dict[str, Any] = {"image_grid_thw": given.get("image_grid_thw")}
    own.setdefault("attention_mask", torch.ones_like(tokens))
    if model.config.model_type == "qwen2_5_omni_thinker":
        mask = given.get("feature_attention_mask")
        options["audio_seqlens"] = None if mask is None else mask.sum(1)
    else:
        is_image = (tokens == model.config.image_token_id).long()
        options["mm_token_type_ids"] = own.setdefault("mm_token_type_ids", is_image)
    positions: Tensor
    positions, _ = model.model.get_rope_index(
        tokens, attention_mask=own["attention_mask"], **options
    )
    return positions


@dataclass(frozen=True)
class Multimodal:
    """Packing of a vision-language model.

    Attributes:
        kind: of the family.
        parts: images or sounds, and the names of the tensors with slots for them.
        has_positions: whether the batch's positions were made here.
        is_counted: whether the model is told how many images a sample has.
    """

    kind: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    has_positions: bool
    is_counted: bool

    def call(self, module: nn.Module, tensors: Mapping[str, Any], *, traced: bool) -> Any:
        """Call the model as it is, or so that its operations do not depend on the data."""
        own = {**tensors, "use_cache": False}
        inputs = {part: {name: own.pop(name) for name in names} for part, names in self.parts}
        counts = {part: own.pop(f"{part}_counts") for part in inputs}
        index = [own.pop(f"{part}_index") for part in inputs]
        encoders = FAMILIES[self.kind]
        if any(isinstance(encoder, Patches) for encoder in encoders.values()):
            own["position_ids"] = own["position_ids"].movedim(0, 1)
        if traced:
            outputs = {part: encoders[part].encode(module, inputs[part]) for part in inputs}
            with _gathered(module, index, outputs.pop("audio", None)) as extra:
                return module(**own, **extra, mm_encoder_outputs=outputs)
        if self.has_positions:
            del own["position_ids"]
        for part, values in inputs.items():
            if counts[part].any():
                own |= encoders[part].own(values, Slots(counts[part], self.is_counted))
        return module(**own)


@contextmanager
def _gathered(model: Any, index: list[Tensor], sounds: Any) -> Iterator[dict[str, Any]]:
    """Inside, features come to their tokens by an index within their sample, so that a sample's
    features stay in it. Yields further arguments of the model.
    """
    images, left = index[-1:], list(index)

    def rows(features: Tensor, at: Tensor) -> Tensor:
        width = features.shape[-1]
        own = features.reshape(at.shape[0], -1, width)
        return own.gather(1, at[..., None].expand(-1, -1, width))

    def scatter(values: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        return torch.where(mask, rows(features, left.pop(0)), values)

    def deepstack(_: Any, values: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        added = rows(features, images[0]).to(values.dtype)
        return torch.where(mask[..., None], values + added, values)

    file = sys.modules[type(model).__module__]
    values: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "masked_scatter", scatter),
        # Counts of all features against all placeholders; those of each sample were compared.
        (file, "torch_compilable_check", lambda *_, **__: None),
    ]
    text = type(getattr(model.model, "language_model", None))
    if hasattr(text, "_deepstack_process"):
        values.append((text, "_deepstack_process", deepstack))
    extra = {}
    if sounds is not None:
        values.append((type(model.model), "get_audio_features", lambda *_, **__: sounds))
        extra["input_features"] = sounds.pooler_output
    with replaced(values):
        yield extra
