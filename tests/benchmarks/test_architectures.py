"""Architectures of others: some that are equal to one process, and those that are refused."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from anabranch.planner.auto import planner as auto
from benchmarks.architectures import multimodal, planning
from benchmarks.architectures.__main__ import examined
from benchmarks.architectures.models import ARCHITECTURES

ALIKE = {
    "InternVL": "has a projection behind its own tower, as Llava has",
    "PaliGemma": "has the masks of Gemma3, between all pictures",
    "Llava": "is trained for some steps in ``tests/multimodal/test_training.py``",
    "SmolVLM": "computes what Idefics3 does",
    "Qwen2VL": "has the positions of Qwen2.5-Omni, and fewer kinds of layers than Qwen3-VL",
    "Qwen2_5_VL": "reads images and text as Qwen2.5-Omni does",
    "Qwen3VLMoe": "reads images as Qwen3VL does, and has the experts of Qwen2Moe",
    "Qwen3_5": "reads images as Qwen3VL does",
    "Qwen3_5Moe": "likewise, with the experts of Qwen2Moe",
    **dict.fromkeys(
        (
            *("VipLlava", "AyaVision", "Cohere2Vision", "DeepseekVL", "GotOcr2"),
            *("Ovis2", "QianfanOCR", "VideoLlava"),
        ),
        "has a projection behind its own tower, as Llava has",
    ),
    **dict.fromkeys(
        ("GlmOcr", "Exaone4_5_", "HyperCLOVAXVisionV2", "Qwen3OmniMoeThinker"),
        "reads packed patches as Qwen2.5-Omni does",
    ),
    **dict.fromkeys(
        ("Glm4v", "Glm4vMoe", "Glm46V"),
        "looks up positions patch by patch, else reads as Qwen2.5-Omni does",
    ),
    **dict.fromkeys(
        ("LightOnOcr", "Mistral3"),
        "lets the patches of an image see each other, as those of a window of Qwen2.5-Omni do",
    ),
    **dict.fromkeys(("LlavaNext", "LlavaNextVideo"), "arranges tiles as LlavaOnevision does"),
}
"""Model beside images that others stand for -> why. ``tests/multimodal/test_batches.py`` compares
what is traced with every model's own forward, of whole batches and of slices.
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen2Moe", "coupled"),
        ("Swin", "weighted mean"),
        *((name, "weighted mean") for name in multimodal.NAMES if name not in ALIKE),
    ],
)
def test_a_step_is_that_of_the_whole_batch(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three stages in micro-batches of two samples; stochastic depth is off. The balance of
    experts is that of the whole batch. One layer reads texts, pictures and sounds, of Gemma3 and
    where windows are looked at one of each kind.
    """
    layers = {"_VISION": "num_hidden_layers", "_SOUNDS": "encoder_layers"}
    if name != "Gemma3":
        layers |= dict.fromkeys(("_TEXT", "_POSITIONS"), "num_hidden_layers")
    if name == "Qwen3VL":
        layers["_PATCHES"] = "depth"
    for options, key in layers.items():
        monkeypatch.setattr(multimodal, options, {**getattr(multimodal, options), key: 1})
    if name == "Qwen2Moe":
        whole = ARCHITECTURES[name]
        one = replace(whole, small={**whole.small, "num_hidden_layers": 1})
        monkeypatch.setitem(ARCHITECTURES, name, one)
    found = examined(name)
    assert found["loss"] == kind
    assert found["loss_error"] < 1e-6
    assert found["gradient_error"] < 1e-6


def test_a_rewritten_step_is_that_of_the_model_as_written() -> None:
    """The branches of a layer are in stages of their own; ``tests/graph/rewrites`` has more."""
    found = examined("EmbeddingBags", ["join-split", "table-split"])
    assert len(found["rewrites"]) == 2
    assert found["loss_error"] < 1e-6
    assert found["gradient_error"] < 1e-6


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Qwen2VLByHand",
            r"pixel_values has the parts of 4 samples one after the other.*\(4, 16, 96\)",
        ),
    ],
)
def test_what_has_no_graph_is_refused_with_class_line_and_a_way_on(name: str, says: str) -> None:
    """A batch whose dimension 0 is not the samples; branches, sizes by data and lists by sample are
    refused in ``tests/graph``.
    """
    error = examined(name)["error"]
    assert error.startswith("CaptureError")
    assert re.search(says, error), error


def test_published_sizes_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, for a few devices; of 26 tables two."""
    chosen = replace(
        ARCHITECTURES["EmbeddingBags"], published={"tables": 2, "rows": 10**6, "width": 64}
    )
    monkeypatch.setitem(ARCHITECTURES, "EmbeddingBags", chosen)
    monkeypatch.setattr(planning, "CLUSTERS", {"v100": "summit:1x4", "h100": "dgx-h100:1x8"})
    monkeypatch.setattr(planning, "BATCH", 8)
    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, evaluations=100))
    found = planning.planned("EmbeddingBags")
    assert found["parameters"] > 10**7
    assert found["data_parallel_step_s"] >= found["step_s"] > 0
    assert 1 <= found["devices"] <= 4
