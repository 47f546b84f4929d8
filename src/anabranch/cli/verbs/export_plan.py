"""The verb ``export-plan``: a chain plan for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.output import folder_to_write, note, print_json, say_written
from anabranch.cli.settings import PlanFile
from anabranch.cli.source import ModelSource, Preset, command_naming, model_of_plan
from anabranch.cli.spread import spread
from anabranch.errors import OutputError


@spread
def export_plan(
    plan_file: PlanFile,
    folder: Annotated[Path, typer.Option("-o", "--output", callback=folder_to_write)],
    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
    torchtitan: Annotated[bool, typer.Option("--torchtitan")] = False,
    preset: Preset | None = None,
) -> None:
    """Write the schedule of PLAN, a chain, for PyTorch.

    It is the CSV file that its pipelining reads. A plan that PyTorch cannot express (stages as a
    graph, micro-batches or replicas that differ, no flush) is refused with its reasons.

    Example: `anabranch plan MODEL --planner sequential --granularity block ... -o plan.json`, then
    `anabranch export-plan plan.json MODEL --torchtitan -o titan`

    Args:
        folder: A new or empty folder.
        model: The model that it is for [default: the plan's, if it is built in].
        torchtitan: torchtitan's options, with names of modules per stage; without it the schedule
            alone, for torch.distributed.pipelining.
        preset: Size of a built-in model [default: the plan's].
    """
    from anabranch.files import load_plan
    from anabranch.files.jsonfile import write_text
    from anabranch.interchange.chain import chain_of, require_chain
    from anabranch.interchange.torchtitan import SCHEDULE_FILE, torchtitan_options
    from anabranch.runtime.plan_parts import parts_of

    plan = load_plan(plan_file)
    require_chain(plan)
    if model is None and ModelSource(plan.model).is_file:
        command = command_naming("package.module:function", plan_file)
        raise typer.BadParameter(
            f"{plan_file} was planned by the profile {plan.model}, and the names of modules are "
            f"the model's own: {command}"
        )
    model = model or model_of_plan(plan.model, plan_file)
    source = ModelSource.of_plan(plan, model, preset)
    captured = source.capture(source.workload(meta=True))
    parts_of(captured, plan, exact=False)  # refuses a plan for another model
    options, chain = None, chain_of(plan, captured.graph)
    if torchtitan:
        options = torchtitan_options(plan, captured, chain)
    texts = {SCHEDULE_FILE: chain.csv}
    if options is not None:
        options["parallelism"]["pipeline_parallel_schedule_csv"] = str(folder / SCHEDULE_FILE)
        texts["torchtitan.json"] = json.dumps(options, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name in texts:
        if (folder / name).exists():
            raise OutputError(
                f"{folder / name} exists, and nothing is replaced; name another folder"
            )
    for name, text in texts.items():
        write_text(folder / name, text)
    if chain.replicas > 1:
        ranks, size = chain.num_ranks, chain.microbatch_size
        lines = "one line" if ranks == 1 else f"a line for each of the {ranks} ranks of one"
        note(
            f"the plan has {chain.replicas} replicas, and the schedule {lines}: every replica runs "
            f"it on {size} samples of each micro-batch, and their gradients have to be averaged, "
            "as DistributedDataParallel does"
        )
    files = [folder / name for name in texts]
    print_json({"files": files, **(options or {})})
    for file in files:
        say_written(file)
