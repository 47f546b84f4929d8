"""Capture every architecture, cut it into three stages, and compare a step with one process; with
``--published``, plan the published sizes; with ``--rewrite``, rewrite the small ones first.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anabranch.data.packed import PackedBatch
from anabranch.errors import AnabranchError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.slices import in_slices, view_named
from anabranch.multimodal import multimodal_batch
from anabranch.plans.whole_batch import with_whole_batches
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.schedule import rule_named
from anabranch.verification import even_plan
from anabranch.workload import Batch, Workload
from benchmarks.architectures import multimodal
from benchmarks.architectures.models import ARCHITECTURES, SAMPLES, build, set_dropout
from benchmarks.architectures.planning import planned


def examined(name: str, rewrites: Sequence[str] = ()) -> dict[str, Any]:
    """What became of one architecture, rewritten or as it is."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, batch = build(name)
        found: dict[str, Any] = {"model": name, "class": type(module).__name__}
        try:
            captured = capture(module, batch, rewrites=rewrites)
            found |= {
                **({"rewrites": captured.graph.rewrites} if rewrites else {}),
                "operators": len(captured.graph),
                "loss": captured.graph.loss_kind,
                "capture_s": round(time.perf_counter() - started, 2),
            }
            return found | _compared(captured, Workload(module, batch), batch)
        except AnabranchError as error:
            text = " ".join(str(error).split())
            return found | {"error": f"{type(error).__name__}: {text}"}


def _compared(captured: Captured, workload: Workload, batch: Batch) -> dict[str, Any]:
    """Three stages in this process, in micro-batches of two samples, against the whole batch."""
    cut = even_plan(captured.graph, min(3, len(captured.graph)), SAMPLES)
    graph = cut.stage_graph
    stages = tuple(replace(s, devices=(0,), microbatch_size=2) for s in graph.stages)
    whole = with_whole_batches(replace(graph, stages=stages), captured.graph)
    alone = replace(cut, stage_graph=rule_named("1f1b").warm_up(whole))
    expected = reference(captured.module, batch, [(0, SAMPLES)])  # before weights are cut
    pipeline = Pipeline(workload, alone, captured=captured, check_gradients=False)
    loss, gradients = pipeline.gradients(batch)
    slices = in_slices(expected.gradients, gradients, view_named)
    largest = max(float(g.abs().max()) for g in slices.values())
    error = max(
        float((gradients[n] - g).abs().max()) if n in gradients else float(g.abs().max())
        for n, g in slices.items()
    )
    return {
        "stages": len(graph),
        "loss_error": abs(loss - expected.loss) / abs(expected.loss),
        "gradient_error": error / largest,
        "normalised": list(captured.graph.normalised),
    }


def ragged_batches(name: str, count: int = 3) -> dict[str, Any]:
    """Batches with zero to four images per sample in several sizes, through three stages, against
    the model's own call on each; there is a bucket for two images and one for four.
    """
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        module = multimodal.small(name)
        set_dropout(module, 0.0)
        length, patches = 128, 5 if "Next" in name or "One" in name else 64

        def packed(own: multimodal.Own, images: int | tuple[int, ...]) -> PackedBatch:
            return multimodal_batch(module, own, images=images, patches=patches)

        examples = [
            packed(multimodal.ragged(name, [k, 1, 2, k], length, mixed=True), k) for k in (4, 2)
        ]
        workload = Workload(module, examples[0], buckets=examples[1:])
        captured = capture(module, workload.example)
        cut = even_plan(captured.graph, 3, SAMPLES)
        stages = tuple(replace(s, devices=(0,), microbatch_size=2) for s in cut.stage_graph.stages)
        graph = rule_named("1f1b").warm_up(replace(cut.stage_graph, stages=stages))
        pipeline = Pipeline(workload, replace(cut, stage_graph=graph), captured=captured)
        draw, rows = random.Random(0), []
        for seed in range(count):
            images = [draw.randint(0, (4, 2)[seed % 2]) for _ in range(SAMPLES)]
            own = multimodal.ragged(name, images, length, seed=seed, mixed=True)
            loss, gradients = pipeline.gradients(packed(own, (2, 4)))
            module.zero_grad()
            output = module(**own, use_cache=False)
            expected = output.loss.item()
            parameters = dict(module.named_parameters())
            wanted = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
            pairs = [
                (gradients.get(n, torch.zeros_like(p)), torch.zeros_like(p) if g is None else g)
                for (n, p), g in zip(parameters.items(), wanted, strict=True)
            ]
            largest = max(float(g.abs().max()) for _, g in pairs)
            error = max(float((a - b).abs().max()) for a, b in pairs) / largest
            rows.append((images, abs(loss - expected) / expected, error))
        return {
            "model": name,
            "operators": len(captured.graph),
            "images": [images for images, _, _ in rows],
            "loss_error": max(loss for _, loss, _ in rows),
            "gradient_error": max(error for _, _, error in rows),
        }


def main() -> None:
    """Print a line per architecture, and write all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--published", action="store_true", help="plan them in published sizes")
    parser.add_argument("--ragged", action="store_true", help="any number of images, three batches")
    parser.add_argument("--rewrite", default="", help="such as tensor-split,table-split")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    rows = []
    sized = [n for n, a in ARCHITECTURES.items() if a.published is not None]
    names = sized if arguments.published else list(ARCHITECTURES)
    names = list(multimodal.NAMES) if arguments.ragged else names
    for name in arguments.names or names:
        rewrites = [text for text in arguments.rewrite.split(",") if text]
        if arguments.ragged:
            rows.append(ragged_batches(name))
        else:
            rows.append(planned(name) if arguments.published else examined(name, rewrites))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
