"""Predicted steps of Qwen2-VL-2B with one to four images per sample: slots of their own, shared in
order, and shared with samples dealt out by cost.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from typing import Any

import torch
import transformers

import anabranch
from anabranch.emulation.rehearsal import rehearse
from anabranch.multimodal import multimodal_batch

IMAGE, START = 151655, 151652
SIDE = 32
"""Patches of an image along a side, 448 pixels; four are merged into a token."""


def model() -> Any:
    """The published size, without values."""
    config = transformers.Qwen2VLConfig(
        text_config={
            **{"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12},
            **{"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936},
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
        },
        vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16},
    )
    with torch.device("meta"):
        return transformers.Qwen2VLForConditionalGeneration(config)


def batch(images: list[int]) -> dict[str, torch.Tensor]:
    """Samples of one length with so many images."""
    tokens = SIDE**2 // 4
    ids = torch.randint(0, 1000, (len(images), 4 * (tokens + 2) + 128))
    for sample, number in enumerate(images):
        for i in range(number):
            place = i * (tokens + 2)
            ids[sample, place] = START
            ids[sample, place + 1 : place + 1 + tokens] = IMAGE
    count = sum(images)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "pixel_values": torch.zeros(count * SIDE**2, 1176),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]).expand(count, 3),
    }


def main() -> None:
    """Print a line per way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ragged_images")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--share", type=int, default=4)
    parser.add_argument("--cluster", default="dgx-h100:1x8")
    parser.add_argument("--planner", default="sequential")
    parser.add_argument(
        "--rehearse", action="store_true", help="run the plans on emulated devices, too"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    draw = random.Random(0)
    images = [draw.choice((1, 1, 1, 4)) for _ in range(arguments.samples)]
    module, own = model(), batch(images)
    for way, options in {
        "slots of their own": {},
        "shared, in order": {"share": arguments.share, "balance": "none"},
        "shared, by cost": {"share": arguments.share},
    }.items():
        packed = multimodal_batch(module, own, **options)
        slots = packed.tensors["pixel_values"].shape[1]
        # A slot costs the same whoever fills it, and an estimate asks for two samples.
        captured = anabranch.capture(
            module, multimodal_batch(module, batch([1, slots]), images=slots)
        )
        groups = arguments.samples // arguments.share
        sizes = tuple(arguments.share << i for i in range(groups.bit_length()))
        profile = anabranch.estimate(captured, "h100", sizes)
        cluster = anabranch.Cluster.preset(arguments.cluster)
        plan = anabranch.plan(profile, cluster, arguments.samples, planner=arguments.planner)
        row = {
            "way": way,
            "images": sum(images),
            "slots": slots * arguments.samples,
            "operators": len(captured.graph),
            "stages": len(plan.stage_graph),
            "step_s": plan.predicted.step_s,
        }
        if arguments.rehearse:
            rehearsal = rehearse(plan, profile, cluster)
            row |= {"emulated_step_s": rehearsal.step_s, "late": rehearsal.late}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
