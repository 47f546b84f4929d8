"""Facts about a model to know before it is planned and trained, one sentence each."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from anabranch.errors import TrainingError, WorkloadError, some
from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import split
from anabranch.graph.loss_kinds import SENTENCES, loss_notes
from anabranch.graph.samples.batch_statistics import WHOLE_BATCH_LOSS
from anabranch.runtime.compute.programs import is_random
from anabranch.runtime.data_feed import refusal_of_data
from anabranch.runtime.state.optimizer_facts import refuse_unsupported, require_recipe_updates
from anabranch.workload import Workload


def findings_without_capture(workload: Workload) -> list[str]:
    """Return facts about a model and its recipes that need no capture, as it may be impossible."""
    return [*_of_module(workload.module), *_of_recipes(workload)]


def findings_of(captured: Captured, workload: Workload, batch_size: int) -> list[str]:
    """Return facts about a captured model, with the reasons why it cannot be trained."""
    findings = []
    try:
        require_recipe_updates(workload, captured.graph)
    except TrainingError as error:
        findings.append(f"it cannot be trained: {error}")
    if refusal := refusal_of_data(captured, workload, batch_size):
        findings.append(f"it cannot be trained: {refusal}")
    return findings + _of_graph(captured)


def _of_module(module: nn.Module) -> list[str]:
    findings = []
    parameters = list(module.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    total = sum(p.numel() for p in parameters)
    if frozen:
        findings.append(
            f"{frozen:,} of {total:,} parameters are frozen: no gradients, optimizer state or "
            "all-reduces of them are planned or made, and no backward where nothing before them "
            "is trained"
        )
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names[id(parameter)].append(name)
    tied = [" = ".join(same) for same in names.values() if len(same) > 1]
    if tied:
        findings.append(
            f"tied weights: {some(tied)}; stages that share one each hold a copy, and their "
            "gradients are summed before every update"
        )
    return findings


def _of_recipes(workload: Workload) -> list[str]:
    """List reasons why the recipes make no optimizer and scheduler that a pipeline can use."""
    trainable = [(name, p) for name, p in workload.module.named_parameters() if p.requires_grad]
    try:
        if trainable:
            optimizer = workload.make_optimizer(trainable)
            refuse_unsupported(optimizer, workload.make_scheduler(optimizer))
    except (WorkloadError, TrainingError) as error:
        return [f"it cannot be trained: {error}"]
    return []


def _of_graph(captured: Captured) -> list[str]:
    kind = captured.graph.loss_kind
    findings = [f"the loss is {SENTENCES[kind]}"] if kind else []
    coupled = {c.operator for c in captured.coupling}
    operators = [op.name for op in captured.graph.ops if op.name in coupled]
    if operators:
        first = next(c for c in captured.coupling if c.operator == operators[0])
        where = f"from {first.operation}{f' in {first.module}' if first.module else ''} on"
        if first.module == WHOLE_BATCH_LOSS:
            where = "in the loss alone"
        findings.append(
            f"samples depend on each other {where}: "
            f"{some(operators)} will have the whole batch, on one replica"
        )
    if captured.assumed and kind != "coupled":
        findings.append(
            f"the graph does not show whether {some(captured.assumed)} computes across samples: "
            "numbers of two halves of a batch decide, or Workload(per_sample=...)"
        )
    if kind != "coupled" and "coupled" in captured.totals.values():
        untold = [name for name, total in captured.totals.items() if total == "coupled"]
        findings.append(
            f"the metric {some(untold)} is no sum or mean over samples: what is shown is the "
            "mean of what the micro-batches have"
        )
    findings += loss_notes(None, captured.graph.normalised, captured.graph.stateful)
    whole = split(captured, [[op.name for op in captured.graph.ops]])
    if is_random(whole.program(0, captured.programs.samples).module):
        findings.append(
            "random numbers are drawn, as by dropout: another plan draws other ones, unless "
            'dropout="sample" makes them the same under any plan'
        )
    if captured.unused:
        findings.append(
            f"no gradient reaches {some(captured.unused)}: the loss does not depend on it; set "
            "requires_grad to False if that is meant"
        )
    return findings
