"""Capture every architecture, cut it into three stages, and compare a step with one process; with
``--published``, plan the published sizes; with ``--rewrite``, rewrite the small ones first.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.slices import in_slices, view_named
from anabranch.plans.whole_batch import with_whole_batches
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.schedule import rule_named
from anabranch.verification import even_plan
from anabranch.workload import Batch, Workload
from benchmarks.architectures.models import ARCHITECTURES, SAMPLES, build
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


def main() -> None:
    """Print a line per architecture, and write all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--published", action="store_true", help="plan them in published sizes")
    parser.add_argument("--rewrite", default="", help="such as tensor-split,table-split")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    rows = []
    sized = [n for n, a in ARCHITECTURES.items() if a.published is not None]
    names = sized if arguments.published else list(ARCHITECTURES)
    for name in arguments.names or names:
        rewrites = [text for text in arguments.rewrite.split(",") if text]
        rows.append(planned(name) if arguments.published else examined(name, rewrites))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
