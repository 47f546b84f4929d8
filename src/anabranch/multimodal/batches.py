"""Batches of vision-language models, and calls of these models, that can be cut by samples."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anabranch.data.packed import PackedBatch
from anabranch.errors import DataError
from anabranch.graph.module_state import on_meta, with_attributes
from anabranch.multimodal.patches import PackedPatches
from anabranch.multimodal.slots import (
    AllowedSizes,
    Inputs,
    Slots,
    balanced_order,
    feature_rows,
    images_per_sample,
    sufficient_size,
    take_rows,
)
from anabranch.multimodal.sounds import Sounds
from anabranch.multimodal.towers import Idefics, LlavaNext, Pixtral, VisionTower, pixtral_tower

Encoder = VisionTower | PackedPatches | Sounds

_KINDS: tuple[tuple[str, Encoder], ...] = (
    ("image_grid_thw", PackedPatches()),
    ("pack_image_features", LlavaNext()),
    ("pixel_attention_mask", Idefics()),
    ("pixel_values", VisionTower()),
)
"""Argument of ``get_image_features``, or method -> encoder; the first one that exists decides."""

_ENCODERS: WeakKeyDictionary[nn.Module, dict[str, Encoder]] = WeakKeyDictionary()
"""Model -> its encoders, which have been tried on the meta device."""


def multimodal_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    images: AllowedSizes = None,
    patches: AllowedSizes = None,
    sounds: AllowedSizes = None,
    chunks: AllowedSizes = None,
    share: int = 1,
    balance: Literal["cost", "none"] = "cost",
) -> PackedBatch:
    """Return a batch of a vision-language model of transformers that can be cut by samples.

    Call it where batches are made, on the output of the model's processor with ``labels``. A
    ``Workload`` takes the result as example and as data. Every sample gets the same number of slots
    for images; slots that it does not fill hold zeros that nothing reads.

    Args:
        model: a model of a class in the table of ``docs/multimodal.md``; its weights are not used.
        batch: a batch as the model itself takes it.
        images: slots of a sample, or all numbers of slots for which the workload has buckets, of
            which the smallest sufficient one is taken; by default as many as the batch needs.
        patches: patches of a slot, given in the same way, for models that take packed patches; its
            tiles for LLaVA-NeXT and LLaVA-OneVision.
        sounds, chunks: slots for sounds, and chunks of a slot, given in the same way.
        share: samples of a micro-batch that share their slots; there are then ``images`` slots per
            sample on average. A micro-batch of every stage is a multiple of it.
        balance: with "cost" samples are reordered so that all groups that share slots cost alike,
            which changes loss and gradients by rounding only; with "none" they keep their order.

    Raises:
        DataError: if the model's class is not known; or a sample has not as many placeholder tokens
            as features, which would move into the next sample.
    """
    config: Any = getattr(model, "config", None)
    encoders = _encoders_of(model)
    own: dict[str, Any] = dict(batch)
    if "pixel_values_videos" in own:
        raise DataError("multimodal_batch takes images; give a video as images, one per frame")
    sizes = {"image": (images, patches), "audio": (sounds, chunks)}
    for part in sizes:
        taken = encoders[part].names if part in encoders else ()
        if others := [n for n in _encoder_arguments(model, part) if n in own and n not in taken]:
            raise DataError(
                f"{type(model).__name__} was given {', '.join(others)}, which multimodal_batch "
                f"does not cut by samples; it takes {', '.join(taken) or f'no {part}'}"
            )
    names = (name for encoder in encoders.values() for name in encoder.names)
    arguments = {name: own.pop(name) for name in names if name in own}
    inputs_of: dict[str, Inputs] = {}
    counts: dict[str, list[int]] = {}
    for part, encoder in encoders.items():
        if encoder.names[0] in arguments:
            inputs_of[part] = _inputs(encoder, model, arguments, sizes[part][1])
        elif sizes[part][0] is not None:
            inputs_of[part] = encoder.inputs(model, encoder.example(config), sizes[part][1]).none()
        else:
            continue
        tokens = (own["input_ids"] == getattr(config, encoder.token)).sum(1).tolist()
        counts[part] = images_per_sample(tokens, inputs_of[part], part)
    has_positions = hasattr(model.model, "get_rope_index")
    made = has_positions and "position_ids" not in own
    if made:
        own["position_ids"] = _positions(model, own, arguments, counts.get("image"))
    if has_positions:
        own["position_ids"] = own["position_ids"].movedim(1, 0)
    if costs := [sum(numbers) for numbers in zip(*counts.values(), strict=True)]:
        order = balanced_order(costs, share, by_cost=balance == "cost" and share > 1)
        own = {name: t[order] if isinstance(t, Tensor) else t for name, t in own.items()}
    packing = Multimodal(
        tuple((part, encoders[part], tuple(inputs.tensors)) for part, inputs in inputs_of.items()),
        made,
        share,
        "batch_num_images" in arguments,
    )
    tensors: dict[str, Tensor] = {}
    for part, inputs in inputs_of.items():
        held = Slots(torch.tensor([counts[part][sample] for sample in order]), share)
        needed = -(-int(held.counts.view(-1, share).sum(1).max()) // share)
        slots = sufficient_size(needed, sizes[part][0], f"{part} inputs", f"{part}s")
        dealt_out, encoder = inputs.reordered(order, counts[part]), encoders[part]
        is_token = own["input_ids"] == getattr(config, encoder.token)
        rows = feature_rows(is_token, dealt_out, held, slots, isinstance(encoder, LlavaNext))
        tensors |= {name: held.put(t, slots) for name, t in dealt_out.tensors.items()}
        tensors |= {f"{part}_counts": held.counts, f"{part}_index": rows}
    return PackedBatch(own | tensors, packing)


def _encoders_of(model: nn.Module) -> Mapping[str, Encoder]:
    """Return the encoders of sounds and images, in the order in which a model takes them; DataError
    for a model that takes no encoded images, or cannot encode them slot by slot.
    """
    if model not in _ENCODERS:
        try:
            encoders = _chosen(model)
            for encoder in encoders.values():
                one = encoder.inputs(model, encoder.example(model.config), None).tensors
                # Others have counted the features of an image already, or need values.
                if isinstance(encoder, PackedPatches | Sounds | Pixtral):
                    slots = {name: tensor[None].to("meta") for name, tensor in one.items()}
                    with torch.no_grad():
                        encoder.encode(on_meta(model), slots)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            why = error if isinstance(error, DataError) else f"its encoder takes no slots: {text}"
            raise DataError(
                f"multimodal_batch does not know {type(model).__name__} ({why}); give the patches "
                "or images of each sample in a dimension of their own, or Workload rows={...}, see "
                "docs/multimodal.md"
            ) from error
        _ENCODERS[model] = encoders
    return _ENCODERS[model]


def _encoder_arguments(model: Any, part: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of the method that encodes images or sounds; none without a method."""
    method = getattr(getattr(model, "model", None), f"get_{part}_features", None)
    return {} if method is None else inspect.signature(method).parameters


def _chosen(model: nn.Module) -> dict[str, Encoder]:
    """Choose encoders by arguments of the model's methods; DataError if none fits its images."""
    arguments = _encoder_arguments(model, "image")
    if (
        not arguments
        or "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters
    ):
        raise DataError("its forward takes no mm_encoder_outputs, as of transformers 5.23")
    kinds = (e for name, e in _KINDS if name in arguments or hasattr(model.model, name))
    encoder = Pixtral() if pixtral_tower(model) is not None else next(kinds, None)
    if encoder is None:
        raise DataError(f"its images are given as {', '.join(arguments)}")
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = (n for n, a in arguments.items() if a.default is a.empty and a.kind not in several)
    if others := [name for name in required if name not in encoder.names]:
        raise DataError(f"its images come with {', '.join(others)}")
    tower: Any = getattr(model.model, "audio_tower", None)
    has_chunks = hasattr(sys.modules[type(tower).__module__], "chunk_and_pad_features")
    sounds: dict[str, Encoder] = {"audio": Sounds()}
    return (sounds if has_chunks and hasattr(tower, "conv1") else {}) | {"image": encoder}


def _inputs(
    encoder: Encoder, model: Any, arguments: Mapping[str, Tensor], size: AllowedSizes
) -> Inputs:
    try:
        return encoder.inputs(model, arguments, size)
    except KeyError as error:
        first, missing = encoder.names[0], error.args[0]
        if missing not in encoder.names:
            raise
        raise DataError(
            f"{type(model).__name__} was given {first} {[*arguments[first].shape]} without "
            f"{missing}; its processor gives both, so keep {missing} in the batch"
        ) from None


def _positions(
    model: Any, own: dict[str, Tensor], arguments: Mapping[str, Tensor], images: list[int] | None
) -> Tensor:
    """Return the positions of tokens by the library's function; tokens of images have three."""
    tokens = own["input_ids"]
    options: dict[str, Any] = {"image_grid_thw": arguments.get("image_grid_thw")}
    own.setdefault("attention_mask", torch.ones_like(tokens))
    taken = inspect.signature(model.model.get_rope_index).parameters
    if "audio_seqlens" in taken:
        mask = arguments.get("feature_attention_mask")
        options["audio_seqlens"] = None if mask is None else mask.sum(1)
    if "mm_token_type_ids" in taken:
        is_image = (tokens == model.config.image_token_id).long()
        options["mm_token_type_ids"] = own.setdefault("mm_token_type_ids", is_image)
    positions: Tensor
    try:
        positions, _ = model.model.get_rope_index(
            tokens, attention_mask=own["attention_mask"], **options
        )
    except (RuntimeError, TypeError, ValueError, IndexError, StopIteration) as error:
        is_image = tokens == model.config.image_token_id
        starts = is_image[:, :1].sum(1) + (is_image[:, 1:] & ~is_image[:, :-1]).sum(1)
        pairs = enumerate(zip(images or [0] * len(tokens), starts.tolist(), strict=True))
        others = (
            f": sample {sample} has {count} images, and {runs} run{'s' * (runs != 1)} of image "
            "tokens"
            for sample, (count, runs) in pairs
            if count != runs
        )
        raise DataError(
            f"{type(model).__name__} has no positions for these tokens{next(others, '')}; the "
            "tokens of an image are in one run, between its start and end tokens, which part it "
            f"from an image beside it (transformers says: {error})"
        ) from error
    return positions


@dataclass(frozen=True)
class Multimodal:
    """Packing of a vision-language model.

    Attributes:
        parts: ("image" or "audio", encoder, names of its tensors with slots).
        has_positions: whether the positions of the batch were made here.
        share: samples that share their slots.
        is_counted: whether the model gets the number of images of each sample.
    """

    parts: tuple[tuple[str, Encoder, tuple[str, ...]], ...]
    has_positions: bool
    share: int
    is_counted: bool

    def call(self, module: nn.Module, tensors: Mapping[str, Any], *, traced: bool) -> Any:
        """Call the model unchanged, or ``traced``, so that its operations do not depend on data."""
        own = {**tensors, "use_cache": False}
        inputs = {part: {name: own.pop(name) for name in names} for part, _, names in self.parts}
        counts = {part: own.pop(f"{part}_counts") for part in inputs}
        index = [own.pop(f"{part}_index") for part in inputs]
        encoders = {part: encoder for part, encoder, _ in self.parts}
        if hasattr(module.model, "get_rope_index"):
            own["position_ids"] = own["position_ids"].movedim(0, 1)
        if traced:
            outputs = {part: encoders[part].encode(module, inputs[part]) for part in inputs}
            with _gathered(module, index, self.share, outputs.pop("audio", None)) as extra:
                return module(**own, **extra, mm_encoder_outputs=outputs)
        if self.has_positions:
            del own["position_ids"]
        for part, values in inputs.items():
            if counts[part].any():
                own |= encoders[part].arguments(
                    values, Slots(counts[part], self.share, self.is_counted)
                )
        return module(**own)


@contextmanager
def _gathered(model: Any, index: list[Tensor], share: int, sounds: Any) -> Iterator[dict[str, Any]]:
    """Context manager under which tokens take features by an index within the sample, so that
    features of a sample stay in it; yields further arguments of the model.
    """
    images, left = index[-1:], list(index)

    def rows(features: Tensor, at: Tensor) -> Tensor:
        own = features.reshape(at.shape[0], -1, features.shape[-1])
        return take_rows(own, at, share)

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
    with with_attributes(values):
        yield extra
