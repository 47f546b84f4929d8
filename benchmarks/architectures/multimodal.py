"""Vision-language models of transformers as they are, small, with batches of any images."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

IMAGE, START, END, SOUND = 3, 4, 5, 7
"""Tokens that stand for a part of an image, begin and end one, and stand for a part of a sound."""
WORDS = 64
Own = dict[str, torch.Tensor]

_TEXT: Mapping[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8},
    **{"num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": WORDS},
    **{"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_VISION: Mapping[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 32, "image_size": 16, "patch_size": 8},
}
_PATCHES: Mapping[str, Any] = {
    **{"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
}
_WINDOWS = {"intermediate_size": 32, "out_hidden_size": 16, "window_size": 16}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
_POSITIONS = {**{k: v for k, v in _TEXT.items() if k != "head_dim"}, "rope_parameters": _ROPE}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 6}
_BOUNDS = {"vision_start_token_id": START, "vision_end_token_id": END}
_TABLE = {
    **{**_PATCHES, "out_hidden_size": 16, "intermediate_size": 32},
    **{"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
}
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 16,
}
_EXPERTS_OF_GLM = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
}
_SOUNDS = {
    **{"num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "n_window": 4},
    **{"encoder_ffn_dim": 32, "d_model": 16, "max_source_positions": 64, "output_dim": 16},
}


def small(name: str) -> nn.Module:
    """A model of one of the classes, with weights by torch's own generator."""
    config = getattr(transformers, f"{name}Config")
    llama = transformers.LlamaConfig(**_TEXT)
    made: dict[str, Callable[[], Any]] = {
        "Llava": lambda: config(
            text_config=llama,
            vision_config=transformers.CLIPVisionConfig(**_VISION, projection_dim=16),
            image_token_id=IMAGE,
        ),
        "Gemma3": lambda: config(
            text_config=transformers.Gemma3TextConfig(
                **_TEXT, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
            ),
            vision_config=transformers.SiglipVisionConfig(**_VISION),
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
        ),
        "PaliGemma": lambda: config(
            text_config=transformers.GemmaConfig(**_TEXT),
            vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False),
            projection_dim=16,
            image_token_id=IMAGE,
        ),
        "InternVL": lambda: config(
            text_config=transformers.Qwen2Config(**_TEXT),
            vision_config=transformers.InternVLVisionConfig(
                **{**_VISION, "image_size": [32, 32], "patch_size": [8, 8]}
            ),
            image_token_id=IMAGE,
        ),
        "LlavaOnevision": lambda: config(
            text_config=transformers.Qwen2Config(**_TEXT),
            vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False),
            image_token_id=IMAGE,
            image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        "LlavaNext": lambda: config(
            text_config=llama,
            vision_config=transformers.CLIPVisionConfig(**_VISION, projection_dim=16),
            image_token_id=IMAGE,
            image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
        ),
        "Qwen2VL": lambda: config(
            text_config=_POSITIONS,
            vision_config={**_PATCHES, "embed_dim": 16},
            **_TOKENS,
            **_BOUNDS,
        ),
        "Qwen2_5_VL": lambda: config(
            text_config=_POSITIONS,
            vision_config={**_PATCHES, **_WINDOWS, "fullatt_block_indexes": [1]},
            **_TOKENS,
            **_BOUNDS,
        ),
        "Qwen2_5OmniThinker": lambda: config(
            text_config=_POSITIONS,
            vision_config={**_PATCHES, **_WINDOWS, "fullatt_block_indexes": [1]},
            audio_config=_SOUNDS,
            **_TOKENS,
            **_BOUNDS,
            **{"audio_token_id": SOUND, "audio_start_token_id": 1, "audio_end_token_id": 2},
        ),
    }
    texts: dict[str, dict[str, Any]] = {
        "Qwen3VL": {"rope_parameters": _ROPE},
        "Qwen3VLMoe": {"rope_parameters": _ROPE, **_EXPERTS},
        "Qwen3_5": _LINEAR,
        "Qwen3_5Moe": {**_LINEAR, **_EXPERTS},
    }
    if name in texts:
        vision = {k: v for k, v in _TABLE.items() if "VL" in name or "deepstack" not in k}
        made[name] = lambda: config(
            text_config={**_TEXT, **texts[name]}, vision_config=vision, **_TOKENS, **_BOUNDS
        )
    siglip = transformers.SiglipVisionConfig(**_VISION, vision_use_head=False)
    cohere = transformers.Cohere2Config(**_TEXT)
    made |= {
        "VideoLlava": lambda: config(
            text_config=llama,
            vision_config=transformers.CLIPVisionConfig(**_VISION, projection_dim=16),
            image_token_id=IMAGE,
            video_token_id=6,
        ),
        "VipLlava": lambda: config(
            text_config=llama,
            vision_config=transformers.CLIPVisionConfig(**_VISION, projection_dim=16),
            image_token_id=IMAGE,
            vision_feature_layers=[-1, -2],
        ),
        "AyaVision": lambda: config(
            text_config=cohere,
            vision_config=siglip,
            image_token_id=IMAGE,
            downsample_factor=2,
            vision_feature_layer=-1,
        ),
        "Cohere2Vision": lambda: config(
            text_config=cohere,
            vision_config=siglip,
            image_token_id=IMAGE,
            downsample_factor=2,
            alignment_intermediate_size=32,
        ),
        "DeepseekVL": lambda: config(text_config=llama, vision_config=siglip, image_token_id=IMAGE),
        "GotOcr2": lambda: config(
            text_config=transformers.Qwen2Config(**_TEXT),
            vision_config={
                **{"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1},
                **{"num_attention_heads": 2, "image_size": 64, "patch_size": 16, "mlp_dim": 16},
                **{"window_size": 2, "global_attn_indexes": [0]},
            },
            image_token_id=IMAGE,
        ),
    }
    glm = {**_POSITIONS, "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}}
    for packed in ("Glm4v", "Glm46V", "GlmOcr", "Glm4vMoe"):
        made[packed] = lambda: config(
            text_config=glm | (_EXPERTS_OF_GLM if name == "Glm4vMoe" else {}),
            vision_config={**_PATCHES, **_WINDOWS, "image_size": 16},
            **_TOKENS,
            **{"image_start_token_id": START, "image_end_token_id": END},
        )
    made["Exaone4_5_"] = lambda: config(
        text_config={**_TEXT, "model_type": "exaone4"},
        vision_config={
            **{**_PATCHES, **_WINDOWS, "fullatt_block_indexes": [1]},
            "num_key_value_heads": 1,
        },
        **_TOKENS,
    )
    made["HyperCLOVAXVisionV2"] = lambda: config(
        text_config=_TEXT,
        vision_config={**_PATCHES, **_WINDOWS, "fullatt_block_indexes": [1]},
        **_TOKENS,
    )
    made["Qwen3OmniMoeThinker"] = lambda: config(
        text_config={**_POSITIONS, **_EXPERTS, "head_dim": 8},
        vision_config=_TABLE,
        audio_config=dict(_SOUNDS),
        **_TOKENS,
        **_BOUNDS,
        audio_token_id=SOUND,
    )
    made["Ovis2"] = lambda: config(
        text_config=transformers.Qwen2Config(**_TEXT),
        vision_config={**_VISION, "hidden_stride": 1, "vocab_size": 32},
        image_token_id=IMAGE,
        visual_indicator_token_ids=[START, END],
        hidden_size=16,
    )
    made["QianfanOCR"] = lambda: config(
        text_config=transformers.Qwen2Config(**_TEXT),
        vision_config={
            **{**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
            "drop_path_rate": 0.0,
        },
        image_token_id=IMAGE,
    )
    made["LlavaNextVideo"] = made["LlavaNext"]
    for pixtral in ("Mistral3", "LightOnOcr"):
        made[pixtral] = lambda: config(
            text_config={**_TEXT, "model_type": "mistral" if name == "Mistral3" else "qwen3"},
            vision_config={**_VISION, "image_size": 32, "patch_size": 4, "model_type": "pixtral"},
            image_token_id=IMAGE,
            spatial_merge_size=2,
        )
    for tiled in ("Idefics3", "SmolVLM"):
        made[tiled] = lambda: config(
            text_config=llama, vision_config=dict(_VISION), image_token_id=IMAGE, scale_factor=2
        )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made[name]())
    if name == "Gemma3":  # which begins with zeros here
        nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    if "Moe" in name:
        model.set_experts_implementation("batched_mm")  # which knows double precision
    return model.train()


NAMES = (
    "Llava", "LlavaOnevision", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Idefics3", "SmolVLM", "Gemma3",
    "Qwen2_5OmniThinker", "PaliGemma", "InternVL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe",
    "VipLlava", "AyaVision", "Cohere2Vision", "DeepseekVL", "GotOcr2", "Ovis2", "QianfanOCR",
    "Glm4v", "Glm46V", "Glm4vMoe", "GlmOcr", "Exaone4_5_", "HyperCLOVAXVisionV2",
    "Qwen3OmniMoeThinker", "Mistral3", "LightOnOcr", "VideoLlava", "LlavaNext", "LlavaNextVideo",
)  # fmt: skip


def llava_7b() -> nn.Module:
    """LLaVA 1.5 with 7 billion parameters."""
    text = transformers.LlamaConfig(
        **{"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096},
    )
    vision = transformers.CLIPVisionConfig(
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "image_size": 336, "patch_size": 14},
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return transformers.LlavaForConditionalGeneration(config).train()


def llava_7b_batch(length: int) -> Own:
    """One image of 576 features and so many words a sample."""
    ids = torch.randint(8, 32000, (4, 576 + length))
    ids[:, :576] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.zeros(4, 3, 336, 336)}


class Adapter(nn.Module):
    """A linear layer that is frozen, and a small one beside it that is trained."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        result: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return result


def add_adapters(module: nn.Module, rank: int = 16) -> None:
    """Freeze a model, and add adapters to queries and values of its language model."""
    module.requires_grad_(False)
    for part in list(module.model.language_model.modules()):  # type: ignore[union-attr]
        for key in ("q_proj", "v_proj"):
            if isinstance(layer := getattr(part, key, None), nn.Linear):
                setattr(part, key, Adapter(layer, rank))


def ragged(
    name: str, images: Sequence[int], length: int = 64, *, seed: int = 0, mixed: bool = False
) -> Own:
    """A batch as the model itself takes it.

    Args:
        images: of each sample.
        mixed: images have several sizes, where the model takes such.
    """
    generator = torch.Generator().manual_seed(seed)
    choose = random.Random(seed).choice
    count = sum(images)
    own: Own = {}
    tokens = [4] * count
    if name.startswith(("Qwen", "Glm", "Exaone", "HyperCLOVAX")):
        sizes = [[1, 4, 4], [1, 4, 8], [1, 8, 8], [2, 4, 4]] if mixed else [[1, 4, 4]]
        if name.startswith("Glm4"):
            sizes = sizes[:3]  # the library counts frames as images
        grids = torch.tensor([choose(sizes) for _ in range(count)]).view(count, 3)
        tokens = (grids.prod(1) // 4).tolist()
        own["image_grid_thw"] = grids
        shape: tuple[int, ...] = (4 * sum(tokens), 96)
    elif name in ("Mistral3", "LightOnOcr"):
        own["image_sizes"] = torch.tensor(
            [choose([[16, 16], [16, 8], [8, 24]] if mixed else [[16, 16]]) for _ in range(count)]
        ).view(count, 2)
        tokens = (own["image_sizes"] // 8).prod(1).tolist()
        shape = (count, 3, 16, 24)
    elif name in ("LlavaNext", "LlavaNextVideo", "LlavaOnevision"):
        # The image as a whole, and tiles, of 2 x 2 features each, with a line break a row.
        known = {(16, 32): 14, (16, 16): 10, (32, 32): 24, (12, 32): 14}
        chosen = [choose(list(known) if mixed else [(16, 32)]) for _ in range(count)]
        own["image_sizes"] = torch.tensor(chosen).view(count, 2)
        tokens = [known[size] for size in chosen]
        shape = (count, 5 if mixed else 3, 3, 16, 16)
    elif name in ("Idefics3", "SmolVLM"):
        tokens = [1] * count
        shape = (len(images), max(images), 3, 16, 16)
    else:
        if name in ("AyaVision", "Cohere2Vision", "GotOcr2"):
            tokens = [1] * count
        side = {"InternVL": 32, "QianfanOCR": 32, "GotOcr2": 64}.get(name, 16)
        shape = (count, 3, side, side)
    own["pixel_values"] = torch.randn(shape, generator=generator)
    ids = torch.randint(8, WORDS, (len(images), length), generator=generator)
    lengths = iter(tokens)
    for sample, number in enumerate(images):
        place = 2
        for _ in range(number):
            stop = place + 1 + next(lengths)
            ids[sample, place], ids[sample, place + 1 : stop], ids[sample, stop] = START, IMAGE, END
            place = stop + 1
            assert place <= length, "the images are longer than the text"
    if name in ("Idefics3", "SmolVLM"):
        for sample, number in enumerate(images):
            own["pixel_values"][sample, number:] = 0
    if name == "Qwen2_5OmniThinker":
        own |= _with_sounds(ids, generator)
    if not count:
        own = {key: value for key, value in own.items() if key.startswith(("input_f", "feature"))}
    if name in ("Gemma3", "PaliGemma"):
        own["token_type_ids"] = (ids == IMAGE).long()
    elif name.startswith(("Qwen", "Glm")) and name != "Qwen2_5OmniThinker":
        own["mm_token_type_ids"] = (ids == IMAGE).long()
    is_other = (ids == IMAGE) | (ids == SOUND) & (name == "Qwen2_5OmniThinker")
    labels = ids.masked_fill(is_other, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **own}


def _with_sounds(ids: torch.Tensor, generator: torch.Generator) -> Own:
    """Sounds of some lengths at the end of the samples, the third of which has none."""
    frames = [(16, 11, 0, 24)[i % 4] for i in range(len(ids))]
    for sample, number in enumerate(frames):
        if number:
            after = (number - 1) // 2 + 1
            start = ids.shape[1] - ((after - 2) // 2 + 1) - 2
            ids[sample, start - 1], ids[sample, start:-2], ids[sample, -2] = 1, SOUND, 2
    lengths = torch.tensor([number for number in frames if number])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    features = torch.randn(len(lengths), 8, mask.shape[1], generator=generator)
    return {"input_features": features, "feature_attention_mask": mask}
