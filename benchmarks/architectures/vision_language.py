"""Encoders before a language model in published sizes, trained, frozen, or with low-rank adapters,
planned for 32 H100.

    .venv/bin/python -m benchmarks.architectures.vision_language            # all; or names

Images and sounds come first, then the text; matrix products run in tf32.

``frozen``: the encoders are not trained; ``adapters``:
only the projectors are, and matrices of rank 16 beside every linear layer of the language model.
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import anabranch
from anabranch.errors import AnabranchError
from anabranch.graph.capture import capture
from benchmarks.architectures.planning import BATCH, CLUSTERS, step
from benchmarks.planners.common import processor_s

TEXT = 128
"""Tokens of text per sample."""

RANK = 16
KINDS = ("trained", "frozen", "adapters")


class Adapted(nn.Module):
    """A linear layer that is left as it is, and a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        options: Any = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, **options)
        self.up = nn.Linear(rank, base.out_features, **options)
        if not base.weight.is_meta:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of a value, with what was learned on top."""
        made: Tensor = self.base(x) + self.up(self.down(x))
        return made


def adapt(module: nn.Module, rank: int = RANK) -> None:
    """Put adapters beside the linear layers of a module's blocks, and freeze the rest."""
    module.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if (
                isinstance(child, nn.Linear)
                and name != "lm_head"
                and not isinstance(parent, Adapted)
            ):
                setattr(parent, name, Adapted(child, rank))


class Multimodal(nn.Module):
    """Encoders beside each other, a projector for each, and a language model that reads what they
    make before the text.
    """

    def __init__(self, encoders: dict[str, nn.Module], language: nn.Module) -> None:
        super().__init__()
        self.encoders, self.language = nn.ModuleDict(encoders), language
        width = language.config.hidden_size
        self.projectors = nn.ModuleDict(
            {name: _projector(encoder, width) for name, encoder in encoders.items()}
        )

    def forward(self, input_ids: Tensor, **entries: Tensor) -> Tensor:
        """Return the loss of the next token of the text."""
        seen = [
            self.projectors[name](encoder(entries[name]).last_hidden_state)
            for name, encoder in self.encoders.items()
        ]
        embedded = torch.cat([*seen, self.language.get_input_embeddings()(input_ids)], 1)
        ahead = embedded.shape[1] - input_ids.shape[1]
        labels = nn.functional.pad(input_ids, (ahead, 0), value=-100)
        loss: Tensor = self.language(inputs_embeds=embedded, labels=labels).loss
        return loss


def _projector(encoder: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(encoder.config.hidden_size, width), nn.GELU(), nn.Linear(width, width)
    )


def _clip() -> nn.Module:
    config = transformers.CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    return transformers.CLIPVisionModel(config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        num_mel_bins=128,
        d_model=1280,
        encoder_layers=32,
        encoder_attention_heads=20,
        encoder_ffn_dim=5120,
    )
    return transformers.models.whisper.modeling_whisper.WhisperEncoder(config)


MODELS = {
    "LLaVA-7B": {"image": _clip},
    "images and sound, 7B": {"image": _clip, "sound": _whisper},
}
"""Name -> encoders; the language model is Llama with 7 billion parameters."""


def build(name: str, kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """One of the models, on the meta device, with a batch of two samples."""
    with torch.device("meta"):
        encoders = {part: make() for part, make in MODELS[name].items()}
        language = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))
        model = Multimodal(encoders, language).train()
        if kind != "trained":
            model.encoders.requires_grad_(False)
        if kind == "adapters":
            adapt(model.language)
        batch = {
            "input_ids": torch.zeros(2, TEXT, dtype=torch.long),
            "image": torch.zeros(2, 3, 336, 336),
            "sound": torch.zeros(2, 128, 3000),
        }
    return model, {key: batch[key] for key in ("input_ids", *encoders)}


def planned(name: str, kind: str) -> dict[str, Any]:
    """Steps of the plan, of data parallelism with shared state, and of the best chain."""
    started = processor_s()
    module, batch = build(name, kind)
    row: dict[str, Any] = {
        "model": name,
        "kind": kind,
        "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "frozen": sum(p.numel() for p in module.parameters() if not p.requires_grad),
    }
    try:
        captured = capture(module, batch)
        counts = tuple(1 << i for i in range(7))
        profile = anabranch.estimate(captured, "h100", counts, precision="tf32")
        cluster = anabranch.Cluster.preset(CLUSTERS["h100"])
        towers = [op.name.startswith("encoders") for op in profile.graph.ops]
        seconds = [cost.forward_s[0] + cost.backward_s[0] for cost in profile.costs]
        encoders = sum(s for s, is_tower in zip(seconds, towers, strict=True) if is_tower)
        plan = anabranch.plan(profile, cluster, BATCH)
        graph = plan.stage_graph
        return row | {
            "operators": len(profile.graph),
            "encoder_share": encoders / sum(seconds),
            "stages": len(graph),
            "depth": graph.depth,
            "replicas": [stage.replicas for stage in graph.stages],
            "recompute": sum(stage.recompute for stage in graph.stages),
            "step_s": plan.predicted.step_s,
            "data_parallel_step_s": step(profile, cluster, "data-parallel"),
            "chain_step_s": step(profile, cluster, "auto", planner_options={"shape": "chain"}),
            "seconds": round(processor_s() - started, 1),
        }
    except AnabranchError as error:
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def main() -> None:
    """Print a line per model and kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures.vision_language")
    parser.add_argument("names", nargs="*", help="models; by default all")
    for name in parser.parse_args().names or MODELS:
        for kind in KINDS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                print(json.dumps(planned(name, kind)), flush=True)


if __name__ == "__main__":
    main()
