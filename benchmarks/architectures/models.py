"""Architectures of others with their own classes and losses: small ones that are trained, and their
published sizes, which are planned on the meta device.

``build`` makes (module in training mode, batch of four samples). Stochastic depth, which draws
random numbers and is no dropout, is off. Published sizes are what the classes of configurations
have by default, or what is said in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from anabranch.data.packed import PackedBatch
from anabranch.multimodal import multimodal_batch
from benchmarks.architectures import multimodal

Built = tuple[nn.Module, Any]

SAMPLES, LENGTH, WORDS = 4, 8, 64

PUBLISHED_LENGTH = 512
"""Tokens of a sample at the published sizes."""


def causal(name: str, length: int, **options: Any) -> Built:
    """A language model; the labels are the tokens."""
    config = getattr(transformers, f"{name}Config")(use_cache=False, **options)
    tokens = torch.randint(3, config.vocab_size, (SAMPLES, length))
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return _made(config, f"{name}{head}"), {"input_ids": tokens, "labels": tokens}


def masked(name: str, length: int, **options: Any) -> Built:
    """A masked language model; one sample is padded, and most labels are ignored."""
    config = getattr(transformers, f"{name}Config")(**options)
    tokens = torch.randint(3, config.vocab_size, (SAMPLES, length))
    mask = torch.ones(SAMPLES, length, dtype=torch.long)
    mask[0, 3 * length // 4 :] = 0
    labels = tokens.masked_fill(torch.rand(SAMPLES, length) < 0.6, -100)
    labels[:, 0] = tokens[:, 0]
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return _made(config, f"{name}ForMaskedLM"), batch


def translation(name: str, length: int, **options: Any) -> Built:
    """An encoder and a decoder; targets are shorter."""
    config = getattr(transformers, f"{name}Config")(use_cache=False, **options)
    source, target = torch.randint(3, config.vocab_size, (2, SAMPLES, length))
    batch = {"input_ids": source, "labels": target[:, : 3 * length // 4].contiguous()}
    return _made(config, f"{name}ForConditionalGeneration"), batch


def image(name: str, length: int, **options: Any) -> Built:
    """An image classifier."""
    config = getattr(transformers, f"{name}Config")(**options)
    side = getattr(config, "image_size", 224)
    batch = {
        "pixel_values": torch.randn(SAMPLES, 3, side, side),
        "labels": torch.randint(0, config.num_labels, (SAMPLES,)),
    }
    return _made(config, f"{name}ForImageClassification"), batch


class Paired(nn.Module):
    """A model of text and images that compares all of a batch; positional arguments, metrics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, text: dict[str, torch.Tensor], pixel_values: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the model's own contrastive loss, how near the pairs are, and the embeddings."""
        found = self.model(**text, pixel_values=pixel_values, return_loss=True)
        similarity = F.cosine_similarity(found.text_embeds, found.image_embeds)
        return {
            "loss": found.loss,
            "similarity": similarity.mean(),
            "text_embeds": found.text_embeds,
        }


def paired(name: str, length: int, **options: Any) -> Built:
    """CLIP and its kind."""
    config = getattr(transformers, f"{name}Config")(**options)
    text, side = config.text_config, config.vision_config.image_size
    shape = (SAMPLES, min(length, text.max_position_embeddings))
    tokens = torch.randint(3, text.vocab_size, shape)
    tokens[:, -1] = text.eos_token_id
    batch = {"input_ids": tokens}, torch.randn(SAMPLES, 3, side, side)
    return Paired(_made(config, f"{name}Model")), batch


def speech(name: str, length: int, **options: Any) -> Built:
    """Speech to text, such as Whisper."""
    config = getattr(transformers, f"{name}Config")(use_cache=False, **options)
    frames, words = 2 * config.max_source_positions, min(length, config.max_target_positions)
    batch = {
        "input_features": torch.randn(SAMPLES, config.num_mel_bins, frames),
        "labels": torch.randint(3, config.vocab_size, (SAMPLES, words)),
    }
    return _made(config, f"{name}ForConditionalGeneration"), batch


def wav2vec2(name: str, length: int, **options: Any) -> Built:
    """Speech recognition with CTC."""
    config = transformers.Wav2Vec2Config(**options)
    batch = {"input_values": torch.randn(SAMPLES, 64 * length)}
    batch["labels"] = torch.randint(3, config.vocab_size, (SAMPLES, 4))
    return _made(config, "Wav2Vec2ForCTC"), batch


def vilt(name: str, length: int, **options: Any) -> Built:
    """Questions about images, one transformer for both."""
    config = transformers.ViltConfig(**options)
    batch = {
        "input_ids": torch.randint(3, config.vocab_size, (SAMPLES, length)),
        "pixel_values": torch.randn(SAMPLES, 3, config.image_size, config.image_size),
        "labels": torch.rand(SAMPLES, config.num_labels),
    }
    return _made(config, "ViltForQuestionAnswering"), batch


class Detector(nn.Module):
    """A detector whose labels are tensors of the batch, one object per image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, pixel_values: torch.Tensor, class_labels: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        """Return the model's own loss, which wants a list with an entry per image."""
        pairs = zip(class_labels, boxes, strict=True)
        labels = [{"class_labels": label, "boxes": box} for label, box in pairs]
        loss: torch.Tensor = self.model(pixel_values=pixel_values, labels=labels).loss
        return loss


def detr(name: str, length: int, **options: Any) -> Built:
    """Objects in images, matched to what is found."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, use_pretrained_backbone=False, **options
    )
    batch = {
        "pixel_values": torch.randn(SAMPLES, 3, 32, 32),
        "class_labels": torch.randint(0, 5, (SAMPLES, 1)),
        "boxes": torch.rand(SAMPLES, 1, 4) / 2 + 0.1,
    }
    return Detector(_made(config, "DetrForObjectDetection")), batch


_IMAGE, _PATCHES = 3, 4
"""The token that stands for a part of an image, and how many an image has."""


def _text_with_images(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(8, WORDS, (SAMPLES, 2 * length))
    tokens[:, 2 : 2 + _PATCHES] = _IMAGE
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == _IMAGE, -100)}


def llava_by_hand(name: str, length: int, *, vision: Any, text: Any) -> Built:
    """A language model that reads images among its tokens."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=_IMAGE,
        image_token_id=_IMAGE,
    )
    batch = {**_text_with_images(length), "pixel_values": torch.randn(SAMPLES, 3, 16, 16)}
    return _made(config, "LlavaForConditionalGeneration"), batch


def qwen2_vl(name: str, length: int, *, vision: Any, text: Any) -> Built:
    """Likewise; the patches of all images lie one after the other in dimension 0."""
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=_IMAGE, vision_start_token_id=4
    )
    batch = _text_with_images(length)
    batch["input_ids"][:, 1] = 4
    batch["mm_token_type_ids"] = (batch["input_ids"] == _IMAGE).long()
    patches = 4 * _PATCHES  # four of them are merged into a token
    batch["pixel_values"] = torch.randn(SAMPLES * patches, 3 * 2 * 4 * 4)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]]).expand(SAMPLES, 3).contiguous()
    return _made(config, "Qwen2VLForConditionalGeneration"), batch


def vision_language(name: str, length: int) -> Built:
    """A vision-language model as it is: samples with one image, two, none and one."""
    module = multimodal.small(name)
    return module, multimodal_batch(module, multimodal.ragged(name, [1, 2, 0, 1]))


def llava(name: str, length: int, *, is_small: bool = False) -> Built:
    """LLaVA, small or with 7 billion parameters and one image a sample; the name says whether the
    tower is frozen, or all but adapters of the language model (LoRA of rank 16).
    """
    module = multimodal.small("Llava") if is_small else multimodal.llava_7b()
    if name != "Llava":
        module.model.vision_tower.requires_grad_(False)  # type: ignore[union-attr]
    if name == "LlavaLora":
        multimodal.add_adapters(module)
    with torch.device("cpu"):
        small = multimodal.ragged("Llava", [1, 2, 0, 1])
        own = small if is_small else multimodal.llava_7b_batch(length)
        return module, multimodal_batch(module, own)


class Dlrm(nn.Module):
    """Dense tower, bags of embeddings, pairwise interaction (Naumov et al. 2019, section 2)."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(6, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum" if i % 2 else "mean") for i in range(tables)
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, 1)
        )
        self.register_buffer(
            "pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False
        )

    def forward(
        self, dense: torch.Tensor, sparse: list[torch.Tensor], label: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the loss and how many are right."""
        x = self.bottom(dense)
        vectors = torch.stack([x, *(t(i) for t, i in zip(self.tables, sparse, strict=True))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        interaction = products[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([x, interaction], dim=1)).squeeze(1)
        accuracy = ((logits > 0) == (label > 0.5)).float().mean()
        return {"loss": F.binary_cross_entropy_with_logits(logits, label), "accuracy": accuracy}


def embedding_bags(name: str, length: int, *, tables: int, rows: int, width: int) -> Built:
    """Recommendation with EmbeddingBag, the one that is not Hugging Face's."""
    sparse = [torch.randint(0, rows, (SAMPLES, 5)) for _ in range(tables)]
    label = torch.randint(0, 2, (SAMPLES,)).float()
    return Dlrm(tables, rows, width).train(), (torch.randn(SAMPLES, 6), sparse, label)


def _made(config: Any, head: str) -> nn.Module:
    return getattr(transformers, head)(config).train()


@dataclass(frozen=True)
class Architecture:
    """One line of the table.

    Attributes:
        make: (name, tokens of a sample, options of the configuration) -> module and batch.
        small: the options of the one that is trained.
        published: those of the published size; None if it is not planned.
    """

    make: Callable[..., Built]
    small: Mapping[str, Any]
    published: Mapping[str, Any] | None = field(default_factory=dict)


def build(name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Built:
    """A small one, with weights and data by seed and without dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        chosen = ARCHITECTURES[name]
        module, batch = chosen.make(name, LENGTH, **chosen.small)
    set_dropout(module, 0.0)
    return module.to(dtype), cast(batch, dtype)


def build_published(name: str) -> Built:
    """One of the published size, on the meta device."""
    chosen = ARCHITECTURES[name]
    if chosen.published is None:
        raise ValueError(f"{name} has no published size here")
    with torch.device("meta"):
        return chosen.make(name, PUBLISHED_LENGTH, **chosen.published)


def set_dropout(module: nn.Module, probability: float) -> None:
    """Give all dropout a probability, that of attention weights too, which is an attribute."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = probability
        for key, value in vars(part).items():
            if "dropout" in key and isinstance(value, float):
                setattr(part, key, probability)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """A batch whose numbers have another precision."""
    if isinstance(batch, PackedBatch):
        return PackedBatch(cast(batch.tensors, dtype), batch.packing)
    if isinstance(batch, Mapping):
        return {key: cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(cast(value, dtype) for value in batch)
    return batch.to(dtype) if batch.is_floating_point() else batch


_WIDTHS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_TEXT = {
    **_WIDTHS,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CODERS = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}
_TWO_TEXTS = {**_TEXT, **_CODERS, "decoder_start_token_id": 1}
_LEVELS = {"image_size": 32, "num_labels": 5}
_IMAGES = {**_WIDTHS, **_LEVELS, "patch_size": 8}
_TOWERS = {
    "text_config": {**_TEXT, "projection_dim": 16},
    "vision_config": {**_WIDTHS, "image_size": 32, "patch_size": 8, "projection_dim": 16},
    "projection_dim": 16,
}
_GPT = {**_TEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_ONE_KEY = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_POSITIONS = {"max_position_embeddings": PUBLISHED_LENGTH + 2}
"""Two are reserved."""

_BALANCED = {"output_router_logits": True}
"""The router's auxiliary loss is part of the loss."""

_FOUR_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, **_BALANCED},
}
_CAUSAL = ("GPTNeoX", "OPT", "Falcon", "Phi", "Phi3", "Olmo", "Cohere", "Starcoder2")
_GROUPED = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Granite")
_MASKED = ("Bert", "Electra", "ConvBert", "DebertaV2", "ModernBert")
_MORE_GROUPED = (
    *("Cohere2", "Olmo2", "Olmo3", "Glm", "Glm4", "SmolLM3", "Helium", "Arcee", "SeedOss"),
    *("Ministral", "Nemotron", "Ernie4_5", "HunYuanDenseV1", "GPTBigCode"),
)
_MORE_MASKED = ("MegatronBert", "RoFormer", "EuroBert", "XLMRobertaXL")
_MORE_IMAGES = ("Dinov2WithRegisters", "IJepa", "ViTMSN")

ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture(causal, _TEXT) for name in _CAUSAL},
    **{name: Architecture(causal, _ONE_KEY) for name in _GROUPED},
    **{name: Architecture(causal, _ONE_KEY, None) for name in _MORE_GROUPED},
    **{name: Architecture(masked, _TEXT, None) for name in _MORE_MASKED},
    **{name: Architecture(image, _IMAGES, None) for name in _MORE_IMAGES},
    **{name: Architecture(translation, _TWO_TEXTS, None) for name in ("PLBart", "BlenderbotSmall")},
    "Bloom": Architecture(causal, _TEXT, None),
    "Mamba": Architecture(causal, _TEXT, None),  # a call per token without its own kernels
    "StableLm": Architecture(causal, {**_TEXT, "num_key_value_heads": 2}),
    "Mixtral": Architecture(causal, {**_ONE_KEY, "num_local_experts": 4, **_BALANCED}, _BALANCED),
    "Qwen2Moe": Architecture(
        causal, {**_TEXT, "num_key_value_heads": 1, **_FOUR_EXPERTS}, _BALANCED
    ),
    "Qwen3Moe": Architecture(causal, {**_ONE_KEY, **_FOUR_EXPERTS}, _BALANCED),
    "GPT2": Architecture(causal, _GPT, {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "GPTJ": Architecture(causal, {**_GPT, "rotary_dim": 4}),
    "GPTNeo": Architecture(
        causal,
        {**_TEXT, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    **{name: Architecture(masked, _TEXT) for name in _MASKED},
    **{name: Architecture(masked, _TEXT, _POSITIONS) for name in ("Roberta", "MPNet")},
    "Albert": Architecture(masked, {**_TEXT, "embedding_size": 8}),
    "DistilBert": Architecture(
        masked, {**_TEXT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    ),
    **{name: Architecture(translation, _TWO_TEXTS) for name in ("Bart", "Pegasus", "MBart")},
    "T5": Architecture(
        translation,
        {**_TWO_TEXTS, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        {
            **{"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
            "decoder_start_token_id": 0,
        },
    ),
    **{name: Architecture(image, _IMAGES) for name in ("ViT", "DeiT", "Dinov2")},
    "Beit": Architecture(image, {**_IMAGES, "drop_path_rate": 0.0}, {"drop_path_rate": 0.0}),
    "Swin": Architecture(
        image,
        {
            **{**_LEVELS, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]},
            **{"window_size": 2, "drop_path_rate": 0.0},
        },
        {"drop_path_rate": 0.0},
    ),
    "ConvNext": Architecture(
        image,
        {**_LEVELS, "patch_size": 4, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    ),
    "ResNet": Architecture(
        image, {**_LEVELS, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    ),
    **{name: Architecture(paired, _TOWERS) for name in ("CLIP", "Siglip")},
    "Whisper": Architecture(
        speech,
        {
            **{**_CODERS, "vocab_size": WORDS, "num_mel_bins": 8},
            **{"max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        },
        {
            **{"num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32},
            **{"encoder_attention_heads": 20, "decoder_attention_heads": 20},
            **{"encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
        },
    ),
    "EmbeddingBags": Architecture(
        embedding_bags,
        {"tables": 3, "rows": 50, "width": 8},
        {"tables": 26, "rows": 1_000_000, "width": 128},
    ),
    "Wav2Vec2": Architecture(
        wav2vec2,
        {
            **{**_TEXT, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4},
            **{"num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0},
        },
        None,
    ),
    "Vilt": Architecture(vilt, {**_TEXT, "image_size": 32, "patch_size": 8, "num_labels": 5}, None),
    "Detr": Architecture(
        detr,
        {
            **{**_CODERS, "encoder_layers": 1, "decoder_layers": 1},
            **{"num_queries": 4, "num_labels": 5},
        },
        None,
    ),
    **{name: Architecture(vision_language, {}, None) for name in multimodal.NAMES},
    **{
        name: Architecture(llava, {"is_small": True})
        for name in ("Llava", "LlavaFrozen", "LlavaLora")
    },
    "LlavaByHand": Architecture(
        llava_by_hand,
        {
            "text": {**_ONE_KEY, "use_cache": False},
            "vision": {**_WIDTHS, "image_size": 16, "patch_size": 8, "projection_dim": 16},
        },
        None,
    ),
    "Qwen2VLByHand": Architecture(
        qwen2_vl,
        {
            "text": {
                **{**_TEXT, "num_key_value_heads": 1, "use_cache": False},
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            },
            "vision": {
                **{"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
            },
        },
        None,
    ),
}
"""Name of the architecture, as Hugging Face writes it -> how it is made."""
