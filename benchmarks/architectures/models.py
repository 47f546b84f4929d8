"""Small models of many architectures with their own classes and losses, from Hugging Face.

Each entry makes (module in training mode, batch of four samples). Dropout stays as it is;
stochastic depth, which draws random numbers and is no dropout, is off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]

SAMPLES, LENGTH, WORDS = 4, 8, 64

_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _made(config: Any, head: str) -> nn.Module:
    return getattr(transformers, head)(config).train()


def causal(name: str, **further: Any) -> Built:
    """A language model; the labels are the tokens."""
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **further})
    tokens = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return _made(config, f"{name}{head}"), {"input_ids": tokens, "labels": tokens}


def masked(name: str, **further: Any) -> Built:
    """A masked language model; most labels are ignored."""
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **further})
    tokens = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    labels = tokens.masked_fill(torch.rand(SAMPLES, LENGTH) < 0.6, -100)
    labels[:, 0] = tokens[:, 0]
    return _made(config, f"{name}ForMaskedLM"), {"input_ids": tokens, "labels": labels}


def translation(name: str, **further: Any) -> Built:
    """An encoder and a decoder."""
    sizes = {
        **_SIZES,
        **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1},
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **further})
    source, target = torch.randint(3, WORDS, (2, SAMPLES, LENGTH))
    return (
        _made(config, f"{name}ForConditionalGeneration"),
        {"input_ids": source, "labels": target},
    )


def image(name: str, **further: Any) -> Built:
    """An image classifier."""
    sizes = {**_SIZES, "image_size": 32, "patch_size": 8, "num_labels": 5}
    unused = ["vocab_size", "max_position_embeddings", "use_cache"]
    if "depths" in further:  # sizes of its own for every level
        unused += ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    for key in unused:
        del sizes[key]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **further})
    batch = {"pixel_values": torch.randn(SAMPLES, 3, 32, 32)}
    batch["labels"] = torch.randint(0, 5, (SAMPLES,))
    return _made(config, f"{name}ForImageClassification"), batch


class Paired(nn.Module):
    """A model of text and images that compares all of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the model's own contrastive loss."""
        found = self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)
        loss: torch.Tensor = found.loss
        return loss


def paired(name: str) -> Built:
    """CLIP and its kind."""
    tower = {k: _SIZES[k] for k in _SIZES if k not in ("vocab_size", "use_cache")}
    text = {**tower, "vocab_size": WORDS, "projection_dim": 16}
    vision = {**tower, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings"):
        del vision[key]
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, projection_dim=16
    )
    tokens = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    tokens[:, -1] = 2
    batch = {"input_ids": tokens, "pixel_values": torch.randn(SAMPLES, 3, 32, 32)}
    return Paired(_made(config, f"{name}Model")), batch


def whisper() -> Built:
    """Speech to text."""
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    batch = {"input_features": torch.randn(SAMPLES, 8, 32)}
    batch["labels"] = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    return _made(config, "WhisperForConditionalGeneration"), batch


def wav2vec2() -> Built:
    """Speech recognition with CTC."""
    config = transformers.Wav2Vec2Config(
        **{k: _SIZES[k] for k in _SIZES if k != "use_cache"},
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    batch = {"input_values": torch.randn(SAMPLES, 512)}
    batch["labels"] = torch.randint(3, WORDS, (SAMPLES, 4))
    return _made(config, "Wav2Vec2ForCTC"), batch


def vilt() -> Built:
    """Questions about images, one transformer for both."""
    sizes = {key: _SIZES[key] for key in _SIZES if key != "use_cache"}
    config = transformers.ViltConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    batch = {
        "input_ids": torch.randint(3, WORDS, (SAMPLES, LENGTH)),
        "pixel_values": torch.randn(SAMPLES, 3, 32, 32),
        "labels": torch.rand(SAMPLES, 5),
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


def detr() -> Built:
    """Objects in images, matched to what is found."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        use_pretrained_backbone=False,
        num_queries=4,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_labels=5,
    )
    batch = {
        "pixel_values": torch.randn(SAMPLES, 3, 32, 32),
        "class_labels": torch.randint(0, 5, (SAMPLES, 1)),
        "boxes": torch.rand(SAMPLES, 1, 4) / 2 + 0.1,
    }
    return Detector(_made(config, "DetrForObjectDetection")), batch


_IMAGE, _PATCHES = 3, 4
"""The token that stands for a part of an image, and how many an image has."""


def _text_with_images() -> dict[str, torch.Tensor]:
    tokens = torch.randint(8, WORDS, (SAMPLES, 2 * LENGTH))
    tokens[:, 2 : 2 + _PATCHES] = _IMAGE
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == _IMAGE, -100)}


def llava() -> Built:
    """A language model that reads images among its tokens."""
    tower = {key: _SIZES[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    vision = transformers.CLIPVisionConfig(
        **tower, num_attention_heads=2, image_size=16, patch_size=8, projection_dim=16
    )
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_SIZES, num_key_value_heads=1, head_dim=8),
        vision_config=vision,
        image_token_index=_IMAGE,
        image_token_id=_IMAGE,
    )
    batch = {**_text_with_images(), "pixel_values": torch.randn(SAMPLES, 3, 16, 16)}
    return _made(config, "LlavaForConditionalGeneration"), batch


def qwen2_vl() -> Built:
    """Likewise; the patches of all images lie one after the other in dimension 0."""
    text = {**_SIZES, "num_key_value_heads": 1}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=_IMAGE, vision_start_token_id=4
    )
    batch = _text_with_images()
    batch["input_ids"][:, 1] = 4
    batch["mm_token_type_ids"] = (batch["input_ids"] == _IMAGE).long()
    patches = 4 * _PATCHES  # four of them are merged into a token
    batch["pixel_values"] = torch.randn(SAMPLES * patches, 3 * 2 * 4 * 4)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]]).expand(SAMPLES, 3).contiguous()
    return _made(config, "Qwen2VLForConditionalGeneration"), batch


_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}

MODELS: dict[str, Callable[[], Built]] = {
    **{
        name: partial(causal, name)
        for name in (
            *("GPTNeoX", "OPT", "Bloom", "Falcon", "Phi", "Phi3", "Olmo", "Cohere"),
            *("Mamba", "Starcoder2"),
        )
    },
    **{
        name: partial(causal, name, num_key_value_heads=1, head_dim=8)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Granite")
    },
    "StableLm": partial(causal, "StableLm", num_key_value_heads=2),
    "Mixtral": partial(causal, "Mixtral", num_key_value_heads=1, num_local_experts=4),
    "GPT2": partial(causal, "GPT2", **_GPT),
    "GPTJ": partial(causal, "GPTJ", **_GPT, rotary_dim=4),
    "GPTNeo": partial(
        causal, "GPTNeo", num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    ),
    **{
        name: partial(masked, name)
        for name in ("Bert", "Roberta", "Electra", "MPNet", "ConvBert", "DebertaV2", "ModernBert")
    },
    "Albert": partial(masked, "Albert", embedding_size=8),
    "DistilBert": partial(masked, "DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=32),
    **{name: partial(translation, name) for name in ("Bart", "Pegasus", "MBart")},
    "T5": partial(translation, "T5", d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    **{name: partial(image, name) for name in ("ViT", "DeiT", "Dinov2")},
    "Beit": partial(image, "Beit", drop_path_rate=0.0),
    "Swin": partial(
        image,
        "Swin",
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=2,
        drop_path_rate=0.0,
    ),
    "ConvNext": partial(
        image, "ConvNext", patch_size=4, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]
    ),
    "ResNet": partial(image, "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    **{name: partial(paired, name) for name in ("CLIP", "Siglip")},
    "Whisper": whisper,
    "Wav2Vec2": wav2vec2,
    "Vilt": vilt,
    "Detr": detr,
    "Llava": llava,
    "Qwen2VL": qwen2_vl,
}
"""Name of the architecture, as Hugging Face writes it -> its maker."""
