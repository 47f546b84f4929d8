"""A plan for a workload in one call."""

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anabranch import Cluster, Workload, plan_workload
from anabranch.calibration.kept import keep
from anabranch.cli import app
from anabranch.models.names import resolve
from anabranch.training import planning
from tests.calibration.examples import calibration, cluster
from tests.cli.models import towers

OPTIONS = {
    **{"dense_branches": "1", "sparse_branches": "1"},
    **{"rows": "1000000", "pooling": "sum"},
}


@pytest.fixture(scope="module")
def job() -> Workload:
    """A model with a join and a large table, which rewrites can split."""
    return resolve("dlrm", preset="small", options=OPTIONS, meta=True)


def test_it_is_what_the_command_plans(job: Workload) -> None:
    """The same operators, rewrite, stages and step, by a data sheet."""
    where = ["--cluster", "summit:2x4", "--batch-size", "64", "--planner", "graphpipe"]
    model = ["dlrm", "--preset", "small", *(f"-o{name}={n}" for name, n in OPTIONS.items())]
    result = CliRunner().invoke(app, ["plan", *model, *where, "--no-baselines", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    plan = plan_workload(job, Cluster.preset("summit:2x4"), 64, planner="graphpipe")
    assert plan.figures.step_s == document["predicted"]["step_s"]
    assert list(plan.rewrites) == document["rewrites"] != []
    assert list(plan.notes) == document["notes"]
    assert len(plan.stage_graph) == len(document["stages"])


def test_named_rewrites_are_taken_as_they_are(job: Workload) -> None:
    """None of them, or those that are named."""
    for names in ([], ["join-split"]):
        plan = plan_workload(
            job, Cluster.preset("summit:2x4"), 64, planner="data-parallel", rewrites=names
        )
        assert [text.partition("@")[0] for text in plan.rewrites] == names


def test_without_a_flush_the_policy_follows_from_the_optimizer(job: Workload) -> None:
    """No rewrite is tried then."""
    plan = plan_workload(job, Cluster.preset("summit:1x2"), 16, mode="async", planner="sequential")
    assert (plan.mode, plan.rewrites) == ("async", ())


def test_a_batch_needs_a_size(job: Workload) -> None:
    """Where the data takes any number of samples, the caller has to say one."""
    with pytest.raises(ValueError, match="give batch_size"):
        plan_workload(job, Cluster.preset("summit:1x2"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        plan_workload(job, Cluster.preset("summit:1x2"), batchsize=8)


def test_local_ranks_have_the_kept_calibration(
    job: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the command, unless the caller wants none."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    keep(cluster(2))
    options = {"device": "v100", "planner": "data-parallel", "rewrites": []}
    for wanted, expected in ((True, calibration()), (False, None)):
        plan = plan_workload(job, Cluster.preset("local:2"), 16, calibration=wanted, **options)
        assert plan.machines is not None
        assert plan.machines.calibration == expected


def test_load_by_others_while_operators_are_measured_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the line that asks for the plan."""
    quick = partial(planning.measure_workload, repeats=0)
    monkeypatch.setattr(planning, "measure_workload", quick)
    monkeypatch.setattr(planning.OtherLoad, "share", lambda _: 0.9)
    monkeypatch.setattr(planning.OtherLoad, "cores", lambda _: 1.8)
    with pytest.warns(
        UserWarning, match=r"others kept 1\.8 of .* the model was measured"
    ) as caught:
        plan_workload(towers(), Cluster.preset("local:2"), 8, planner="even", rewrites=[])
    assert [warning.filename for warning in caught] == [__file__]
