"""The verb export-plan."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from anabranch.cli.source import ModelSource
from anabranch.files import save_plan
from anabranch.workload import Workload
from tests.interchange.models import Blocks, batch, chain
from tests.runtime import small
from tests.runtime.small import Built, TwoBranch, built, plan

BLOCKS = "tests.cli.verbs.test_export_plan:blocks"


def blocks() -> Workload:
    torch.manual_seed(0)
    return Workload(Blocks(), batch("blocks", 4))


def two_branches() -> Workload:
    return Workload(TwoBranch(), small.batch(4))  # not ``built``: its parameters are on meta


def written(model: Built, folder: Path, stages: int = 4, **options: object) -> str:
    chosen = plan(model, stages, **options)
    granularity = model.captured.granularity
    save_plan(replace(chosen, model=BLOCKS, granularity=granularity), folder / "plan.json")
    return str(folder / "plan.json")


def test_options_of_torchtitan_and_the_schedule(document, run, tmp_path: Path):
    """Names are those of children and list entries; what all stages call is in each of them."""
    file = written(chain("blocks"), tmp_path, schedule="gpipe", microbatch_size=8)
    made = document("export-plan", file, BLOCKS, "--torchtitan", "-o", "titan")
    assert made["files"] == ["titan/schedule.csv", "titan/torchtitan.json"]
    options = json.loads(Path("titan/torchtitan.json").read_text())
    assert options == {key: made[key] for key in options}
    assert options["parallelism"]["module_fqns_per_model_part"] == [
        ["words", "blocks.0", "act"],
        ["blocks.1", "blocks.2", "blocks.3", "act"],
        ["blocks.4", "blocks.5", "act"],
        ["blocks.6", "blocks.7", "act", "head"],
    ]
    assert options["parallelism"]["pipeline_parallel_microbatch_size"] == 8
    assert options["training"] == {"local_batch_size": 16}
    assert Path("titan/schedule.csv").read_text() == "\n".join(
        ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1", "2F0,2F1,2B0,2B1", "3F0,3F1,3B0,3B1", ""]
    )
    code, _, err = run("export-plan", file, BLOCKS, "-o", "titan")
    assert (code, "titan/schedule.csv exists" in err) == (1, True)
    code, out, _ = run("export-plan", file, BLOCKS, "-o", "alone")
    assert (code, out) == (0, "written to alone/schedule.csv\n")
    code, _, err = run("export-plan", file, "-o", "other")
    assert (code, "no file makes anabranch import code" in err) == (2, True)


def test_replicas_are_explained(run, tmp_path: Path):
    """The schedule has the ranks of one pipeline, and says nothing of the others."""
    file = written(chain("blocks"), tmp_path, 1, replicas=[2])
    code, _, err = run("export-plan", file, BLOCKS, "-o", "one")
    said = " ".join(err.split())
    assert (code, Path("one/schedule.csv").read_text().count("\n")) == (0, 1)
    assert "2 replicas, and the schedule one line: every replica runs it on 2 samples" in said
    file = written(chain("blocks"), tmp_path, 2, replicas=[2, 2])
    assert "the schedule a line for each of the 2 ranks of one: every replica" in " ".join(
        run("export-plan", file, BLOCKS, "-o", "two")[2].split()
    )


def test_a_plan_from_a_profile_names_the_command_that_would_work(run, tmp_path: Path):
    """A profile knows operators, not the modules that other programs ask for."""
    chosen = replace(plan(chain("blocks"), 4), model="ours/profile.json")
    save_plan(chosen, tmp_path / "plan.json")
    code, _, err = run("export-plan", "plan.json", "--torchtitan", "-o", "titan")
    assert code == 2
    assert "was planned by the profile ours/profile.json" in err
    command = "anabranch export-plan plan.json package.module:function --torchtitan -o titan"
    assert command in err


def test_a_plan_for_another_model_is_refused(run, tmp_path: Path):
    """It ended in a traceback."""
    file = written(chain("blocks"), tmp_path, 1)
    name = "tests.cli.verbs.test_export_plan:two_branches"
    code, _, err = run("export-plan", file, name, "-o", "other")
    assert (code, "the plan does not fit" in err) == (1, True)


def test_a_graph_is_refused_with_every_reason(run, tmp_path: Path, monkeypatch):
    """Stages that wait for two others, and sizes and replicas that differ; before the model is
    captured, which may take minutes.
    """
    monkeypatch.setattr(ModelSource, "capture", None)
    model = built("TwoBranch")
    sizes, replicas = [4, 8, 6], [1, 2, 1]
    file = written(model, tmp_path, 3, microbatch_size=sizes, replicas=replicas)
    name = "tests.cli.verbs.test_export_plan:two_branches"
    code, _, err = run("export-plan", file, name, "--torchtitan", "-o", "titan")
    said = " ".join(err.split())
    assert code == 1
    assert "its stages form a graph" in said
    assert "micro-batches of 4, 6 and 8 samples" in said
    assert "the last micro-batch of 16 samples is smaller" in said
    assert "1 and 2 replicas" in said
    assert not Path("titan").exists()
