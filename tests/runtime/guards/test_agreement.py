"""What ranks are refused for before they train."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch import launch
from anabranch.errors import AnabranchError, DataError, InvalidPlanError
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.guards import agreement
from anabranch.runtime.guards.agreement import facts_of, require_agreement, version
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Workload
from tests.runtime.small import Built, Chain, batch, built, plan


def refusals(num_ranks: int, *starts: Any) -> list[str]:
    """What all ranks are told by each function, which makes the pipeline of a rank."""

    def rank() -> list[str]:
        texts = []
        for start in starts:
            with pytest.raises(AnabranchError) as caught:
                start(torch.distributed.get_rank())
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
        return texts

    first, *others = launch.run(rank, num_ranks, timeout=60.0)
    assert all(texts == first for texts in others)
    return first


def make(model: Built, chosen: Plan, **options: Any) -> Pipeline:
    workload = options.pop("workload", model.workload)
    return Pipeline(workload, chosen, captured=model.captured, timeout=20.0, **options)


def test_one_process_agrees_with_itself() -> None:
    require_agreement({"plan": "any"})


def test_a_version_names_code_and_torch() -> None:
    """Two checkouts of one version number differ by their source."""
    assert version().startswith("anabranch ")
    assert "(source " in version()
    assert version().endswith(f"torch {torch.__version__}")


def test_facts_differ_where_it_matters() -> None:
    """The same model and plan give the same facts; another width, cut or option does not."""
    model = built("Chain")
    facts = facts_of(model.captured, plan(model, 2), {"accumulate": 1})
    assert facts == facts_of(model.captured, plan(model, 2), {"accumulate": 1})
    assert "2 stages on 2 devices, 1f1b, batch 16" in facts["plan"]
    other = facts_of(model.captured, plan(model, 2, microbatch_size=8), {"accumulate": 2})
    assert [name for name in facts if facts[name] != other[name]] == ["plan", "options"]
    frozen = Chain()
    frozen.head.bias.requires_grad_(False)
    thawed = facts_of(capture(frozen, batch(4)), plan(model, 2), {"accumulate": 1})
    assert [name for name in facts if facts[name] != thawed[name]] == ["model"]


@pytest.mark.dist
def test_both_values_are_told_on_every_rank() -> None:
    """Ranks with one value share a clause."""
    facts = [{"plan": "aa", "options": "x"}, {"plan": "a longer one", "options": "y"}]
    (text,) = refusals(3, lambda rank: require_agreement(facts[rank == 2]))
    assert text.startswith("InvalidPlanError: the ranks disagree on the plan: ")
    assert "ranks 0, 1 have aa; rank 2 has a longer one; start every rank with" in text


@pytest.mark.dist
def test_other_code_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything else is compared: plans of other code may well differ."""
    model = built("Chain")

    def start(rank: int) -> None:
        if rank == 1:
            monkeypatch.setattr(agreement, "version", lambda: "anabranch 9.9, torch 1.0")
        make(model, plan(model, 2, microbatch_size=4 + rank))

    (text,) = refusals(2, start)
    assert f"disagree on the version: rank 0 has {version()}; rank 1 has anabranch 9.9" in text


@pytest.mark.dist
def test_another_plan_model_or_option_on_one_rank() -> None:
    """A plan with another number of devices, a model of another width, another accumulation."""
    model = built("Chain")
    torch.manual_seed(0)
    wide = Chain()
    wide.head = torch.nn.Linear(8, 4)
    other = Built(capture(wide, batch(4)), Workload(wide, batch(4)))
    computes = [ComputeOptions(), ComputeOptions(precision="bf16")]

    of_plan, of_model, of_options = refusals(
        2,
        lambda rank: make(model, plan(model, 2 + rank)),
        lambda rank: make([model, other][rank], plan(model, 2)),
        lambda rank: make(model, plan(model, 2), accumulate=1 + rank, compute=computes[rank]),
    )
    assert "disagree on the plan: rank 0 has 2 stages on 2 devices" in of_plan
    assert "rank 1 has 3 stages on 3 devices" in of_plan
    assert "disagree on the model: rank 0 has Chain with" in of_model
    assert "disagree on the options: rank 0 has accumulate 1, " in of_options
    assert "rank 1 has accumulate 2, " in of_options
    assert "precision fp32" in of_options
    assert "precision bf16" in of_options


@pytest.mark.dist
def test_a_plan_that_all_ranks_share_and_nobody_can_run() -> None:
    """For another model; for another number of devices; a batch of another structure."""
    model, other = built("Chain"), built("TwoBranch")
    strange = batch(16)
    strange["y"] = strange.pop("x")
    of_model, of_devices, of_batch = refusals(
        2,
        lambda rank: make(model, plan(other, 2)),
        lambda rank: make(model, plan(model, 3)),
        lambda rank: make(model, plan(model, 2)).step(strange),
    )
    assert "does not fit Chain captured by layer: the plan lacks operators" in of_model
    assert "the plan is for 3 devices, but 2 processes run it" in of_devices
    assert of_batch.startswith(DataError.__name__)
    assert "holds y, " in of_batch or "holds word, " in of_batch
    assert "lacks x and has y besides" in of_batch


@pytest.mark.dist
def test_another_example_batch_on_one_rank() -> None:
    """The model's leaves are part of it."""
    model = built("Chain")
    renamed = replace(
        model.captured,
        graph=replace(
            model.captured.graph,
            values=tuple(replace(v, name=v.name + "_") for v in model.captured.graph.values),
        ),
    )
    (text,) = refusals(
        2, lambda rank: make([model, replace(model, captured=renamed)][rank], plan(model, 2))
    )
    assert text.startswith(f"{InvalidPlanError.__name__}: the ranks disagree on the model")
