"""Small training workloads that nobody wrote for pipelines: Hugging Face models and a DLRM with
EmbeddingBag.

Each entry of ``MODELS`` builds (module in train mode, example batch of 4 samples). Every module
returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SAMPLES = 4

Built = tuple[nn.Module, Any]


def bert() -> Built:
    """Masked language model; the decoder is tied to the word embedding; padding in the mask."""
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.randint(0, 60, (SAMPLES, 8))
    mask = torch.ones(SAMPLES, 8, dtype=torch.long)
    mask[0, 6:] = 0
    labels = tokens.masked_fill(torch.rand(SAMPLES, 8) < 0.5, -100)
    labels[:, 0] = tokens[:, 0]
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return BertForMaskedLM(config).train(), batch


def gpt2() -> Built:
    """Causal language model; the head is tied to the token embedding."""
    config = GPT2Config(
        vocab_size=60,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, 60, (SAMPLES, 8))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def t5() -> Built:
    """Encoder and decoder; shared token embedding, a position bias that only parameters make."""
    config = T5Config(
        vocab_size=60,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        tie_word_embeddings=True,
        decoder_start_token_id=0,
    )
    source, target = torch.randint(0, 60, (SAMPLES, 8)), torch.randint(1, 60, (SAMPLES, 6))
    return T5ForConditionalGeneration(config).train(), {"input_ids": source, "labels": target}


class Contrastive(nn.Module):
    """CLIP with its own contrastive loss, positional arguments, and two metrics."""

    def __init__(self, model: CLIPModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, text: dict[str, torch.Tensor], image: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        out = self.model(**text, pixel_values=image, return_loss=True)
        # Per sample, so that a slice of the batch has a loss of its own.
        similarity = F.cosine_similarity(out.text_embeds, out.image_embeds)
        return {
            "loss": out.loss + (1 - similarity).mean(),
            "similarity": similarity.mean(),
            "clip_loss": out.loss,
            "text_embeds": out.text_embeds,
        }


def clip() -> Built:
    """Two towers that meet in a contrastive loss."""
    tower = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = tower | {
        "vocab_size": 60,
        "max_position_embeddings": 8,
        "eos_token_id": 59,
        "pad_token_id": 0,
    }
    image = tower | {"image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    tokens = torch.randint(1, 58, (SAMPLES, 8))
    tokens[:, -1] = 59
    batch = ({"input_ids": tokens}, torch.randn(SAMPLES, 3, 16, 16))
    return Contrastive(CLIPModel(config)).train(), batch


def vit() -> Built:
    """Image classifier."""
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    )
    batch = {
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16),
        "labels": torch.randint(0, 5, (SAMPLES,)),
    }
    return ViTForImageClassification(config).train(), batch


class Dlrm(nn.Module):
    """Dense tower, bags of embeddings, pairwise interaction (Naumov et al. 2019, section 2)."""

    def __init__(self, tables: int = 3, rows: int = 50, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum" if i % 2 else "mean") for i in range(tables)
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 16), nn.ReLU(inplace=True), nn.Linear(16, 1)
        )
        self.register_buffer(
            "pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False
        )

    def forward(
        self, dense: torch.Tensor, sparse: list[torch.Tensor], label: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(t(i) for t, i in zip(self.tables, sparse, strict=True))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        interaction = products[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([x, interaction], dim=1)).squeeze(1)
        accuracy = ((logits > 0) == (label > 0.5)).float().mean()
        return {"loss": F.binary_cross_entropy_with_logits(logits, label), "accuracy": accuracy}


def embedding_bags() -> Built:
    """Recommendation model with EmbeddingBag."""
    sparse = [torch.randint(0, 50, (SAMPLES, 5)) for _ in range(3)]
    return Dlrm().train(), (
        torch.randn(SAMPLES, 6),
        sparse,
        torch.randint(0, 2, (SAMPLES,)).float(),
    )


MODELS: dict[str, Callable[[], Built]] = {
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "clip": clip,
    "vit": vit,
    "embedding-bags": embedding_bags,
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Built:
    """One of ``MODELS`` with fixed weights and data, in the given precision."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, batch = MODELS[name]()
    return module.to(dtype), cast(batch, dtype)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {key: cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(cast(value, dtype) for value in batch)
    return batch.to(dtype) if batch.is_floating_point() else batch
