"""The figures of a run for people: the same words in the terminal and on the page.

They come only from the document that ``--json`` prints, so the three cannot contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from anabranch.cluster import BUSY
from anabranch.plans.baselines import is_as_fast
from anabranch.plans.plan import LONGER_IN_A_ROW, NOT_PREDICTED, memory_text, time_text
from anabranch.record.run import LAST_LOSSES, WEIGHED_STEP
from anabranch.report.html import Figure, ReportTable, ms, spent

Document = Mapping[str, Any]
"""Document that ``Run.figures`` returns."""

PHASES = {
    "begin": ("until the first action", "reading the batch, starting together"),
    "compute": ("compute", "of the mean device"),
    "between": ("messages and waiting", "of the mean device, until the last action"),
    "end": ("after the last action", "what is left of all-reduces, agreement, update"),
}
"""Phase of ``Timeline.phases`` -> its name, and an explanation."""


def shown_figures(document: Document) -> list[Figure]:
    """Return the figures of a run, the most important first; without a step, of its evaluation."""
    timed = _without_flush if document.get("mode") == "async" else _of_steps
    return [*_learned(document), *(timed(document) if document["samples_per_s"] else ())]


def beside_tables(document: Document, name: str, other: Document) -> list[ReportTable]:
    """Return a table with the figures of a run and of another one, side by side."""
    here, there = ({f.name: f.value for f in shown_figures(run)} for run in (document, other))
    rows = [(label, here.get(label, ""), there.get(label, "")) for label in here | there]
    rate, their_rate = document["samples_per_s"], other["samples_per_s"]
    remark = f"The curves of {name} are orange."
    if rate and their_rate:
        remark = f"This run has {rate / their_rate:.2f}x the samples per second of {name}. {remark}"
    return [ReportTable(f"Beside {name}", ("", "this run", name), rows, remark)]


def _learned(document: Document) -> Iterator[Figure]:
    losses, metrics = document["losses"], document["metrics"]
    if failure := document.get("failure"):
        when = f"after step {document['first_step'] + len(losses):,}"
        yield Figure("failed", when if losses else "in the evaluation", failure)
    if document["resumed"]:
        more = f"from checkpoint {document['resumed']}"
        more += "; what follows is of the steps since then" if losses else ", and made no step"
        yield Figure("continued", f"after step {document['first_step']:,}", more)
    if losses:
        count = min(len(losses), LAST_LOSSES)
        units = "mini-batches" if document.get("mode") == "async" else "steps"
        more = f"the mean of the last {count}; {losses[0]:.4f} at first, {len(losses):,} {units}"
        if count == 1:
            more = f"of the only {'mini-batch' if units == 'mini-batches' else 'step'}"
        yield Figure("loss", f"{document['last_loss']:.4f}", more)
    # Metrics of training never include the loss.
    prefix = "held-out " if "loss" in metrics else ""
    for name, value in metrics.items():
        chance = document["chance"].get(name)
        text = "not finite" if value is None else f"{value:.4f}"
        when = "" if prefix else "of the last step"
        of_chance = f"chance {chance:.4g}" if chance else ""
        yield Figure(prefix + name, text, "; ".join(filter(None, (when, of_chance))))
    if document["gradients"]:
        value, _, more = document["gradients"].partition(": ")
        yield Figure("gradients", value, more)
    if samples := document.get("batch_samples"):
        more = f"where the plan is for {document['planned_batch_samples']:,}, and its prediction"
        text = " to ".join(f"{count:,}" for count in dict.fromkeys(samples))
        yield Figure("samples in a batch", text, more)
    if document["restarts"]:
        yield Figure("restarts", str(document["restarts"]), "figures are of the last time")
    for text in document.get("recoveries", ()):
        step, _, failure = text.partition(": ")
        yield Figure("went on", f"from {step}", failure)


def _of_steps(document: Document) -> Iterator[Figure]:
    step_s, predicted_s = document["step_s"], document["predicted_step_s"]
    yield Figure("step", time_text(step_s), _beside(step_s, predicted_s))
    yield from _others(document)
    if document["period_s"]:
        more = "each; a rank begins the next when it has done its part"
        if (predicted_period_s := document["predicted_period_s"]) is not None:
            more = f"predicted {time_text(predicted_period_s)} {more}"
            if predicted_period_s > predicted_s and not is_as_fast(predicted_period_s, predicted_s):
                more = f"{more}; predicted {LONGER_IN_A_ROW}"
        yield Figure("steps in a row", time_text(document["period_s"]), more)
    yield Figure("samples per second", f"{document['samples_per_s']:,.0f}", "")
    if (times := document["compute_ratio"]) is not None:
        yield Figure("compute", f"{times:.2f}\u00d7 profiled", "all forwards and backwards")
    if document["ideal_step_s"]:
        origin = "measured" if document["losses"] else "profile's"
        more = f"by this schedule for the {origin} stage times, with links that cost nothing"
        yield Figure("ideal step", time_text(document["ideal_step_s"]), more)
    bubble, predicted_bubble = document["bubble"], document["predicted_bubble"]
    if bubble is not None:
        text = f"predicted {predicted_bubble:.1%}" if predicted_bubble is not None else ""
        share = "share of the step in which the mean device does not compute"
        yield Figure("bubble", f"{bubble:.1%}", f"{text}{'; ' if text else ''}{share}")
    yield _peak(document)
    for text in document.get("stragglers", ()):
        slow, _, how = text.partition(" takes ")
        yield Figure("slow", slow, f"takes {how}, at the last look")
    for text in document.get("plan_changes", ()):
        when, _, why = text.partition(": ")
        yield Figure("another plan", when, why)


def _others(document: Document) -> Iterator[Figure]:
    """Generate the share of the processor time that other processes took, if it matters."""
    if (share := document["others_share"]) > BUSY:
        more = "share of the processor cores' time; no prediction knows of them"
        yield Figure("other processes", f"{share:.0%}", more)


def _peak(document: Document) -> Figure:
    peaks, expected = document["device_peak_bytes"], document["predicted_device_peak_bytes"]
    if peaks:
        # The peak of the fullest rank, with its own prediction.
        peak, planned = max(zip_longest(peaks, expected or (), fillvalue=0))
        also = f"predicted {memory_text(planned)}" if expected else NOT_PREDICTED
        return Figure("peak memory", memory_text(peak), f"{also}; of the fullest device")
    also = f"predicted {memory_text(max(expected))}" if expected else NOT_PREDICTED
    return Figure("peak memory", "not measured", f"{also}; {_why_unweighed(document)}")


def _why_unweighed(document: Document) -> str:
    """Return the reason why the peak was not measured."""
    if not document["losses"]:
        return "emulated devices hold nothing"
    if document["failure"]:
        return "the run has failed"
    if len(document["losses"]) < WEIGHED_STEP:
        return f"the run was too short: memory is measured in step {WEIGHED_STEP}"
    return "compiled stages and batches of other sizes than the plan's cannot be measured"


def _without_flush(document: Document) -> Iterator[Figure]:
    turns = "replicas take mini-batches in turn"
    how = turns if document["round_robin"] else "no flush between mini-batches"
    yield Figure("weight policy", document["policy"], how)
    period_s, predicted_s = document["period_s"], document["predicted_period_s"]
    if period_s:
        yield Figure("mini-batch", time_text(period_s), _beside(period_s, predicted_s))
    yield from _others(document)
    yield Figure("samples per second", f"{document['samples_per_s']:,.0f}", "")
    if differences := document["version_difference"]:
        behind, versions = (
            ", ".join(map(str, n)) for n in (differences, document["peak_versions"])
        )
        yield Figure("version difference", behind, "updates from forward to backward, by stage")
        most = memory_text(max(document["weight_bytes"], default=0))
        yield Figure("weight versions", versions, f"copies, by device; {most} at most")
    expected = document["predicted_device_peak_bytes"]
    if expected:
        more = f"predicted {memory_text(max(expected))}; only steps with a flush are measured"
        yield Figure("peak memory", "not measured", more)


def _beside(seconds: float, predicted_s: float | None) -> str:
    """Return the text behind a measured time: the predicted time, and the difference."""
    if predicted_s is None:
        return NOT_PREDICTED
    ratio = seconds / predicted_s if predicted_s else math.inf
    # A percentage is easy to read for small differences only.
    longer = f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'shorter'}"
    difference = longer if ratio < 2 else f"{ratio:.1f} times as long"
    return f"predicted {time_text(predicted_s)}, {difference}"


def tables(document: Document) -> list[ReportTable]:
    """Return tables of the predicted and measured step by phases, and of the predicted parts."""
    tables: list[ReportTable] = []
    if document.get("mode") != "async" and len(document["phases"]) == 2:
        predicted, measured = document["phases"].values()
        rows: list[tuple[str, ...]] = []
        for phase, (name, what) in PHASES.items():
            both = predicted[phase], measured[phase]
            rows.append((name, ms(both[0]), ms(both[1]), ms(both[1] - both[0]), what))
        sums = sum(predicted.values()), sum(measured.values())
        rows.append(("the step", ms(sums[0]), ms(sums[1]), ms(sums[1] - sums[0]), ""))
        columns = ("part", "predicted, ms", "measured, ms", "more, ms", "what it is")
        tables.append(ReportTable("Predicted against measured", columns, rows))
    if parts := document.get("parts"):
        spent_on = [(part["name"], part["seconds"], part["remark"]) for part in parts]
        step_s = document["predicted_step_s"] or sum(part["seconds"] for part in parts)
        tables.append(spent(spent_on, step_s))
    return tables
