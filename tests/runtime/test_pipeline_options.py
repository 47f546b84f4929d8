"""Options of a run in one record."""

import inspect
from dataclasses import fields, replace

import pytest

from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.pipeline_options import PipelineOptions
from tests.runtime.small import built, plan

DEFAULTS = {field.name: field.default for field in fields(PipelineOptions)}


def defaults(kind: type) -> dict[str, object]:
    """The keyword arguments of a pipeline and their defaults."""
    taken = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in taken if p.kind is p.KEYWORD_ONLY}


def test_pipelines_and_the_record_have_one_set_of_defaults() -> None:
    """A user sees the signature, ranks see the record."""
    assert defaults(Pipeline) == DEFAULTS
    flushless = defaults(AsyncPipeline)
    assert {n: v for n, v in flushless.items() if n in DEFAULTS}.items() <= DEFAULTS.items()
    assert flushless.keys() - DEFAULTS.keys() == {"policy", "round_robin", "clip_stage_norm"}


def test_ranks_compare_every_option_but_their_own() -> None:
    """How long a rank waits, and where it computes, are its own; an option that is added is
    compared.
    """
    compared = PipelineOptions(compute=ComputeOptions(offload=True)).facts()
    own = {"captured", "compute", "timeout", "stall_timeout", "patience", "device", "copies"}
    assert compared.keys() == (DEFAULTS.keys() - own) | {f.name for f in fields(ComputeOptions)}
    assert compared["offload"] is True


def test_a_plan_gives_what_was_left_out() -> None:
    chosen = replace(plan(built("Chain"), 2), precision="bf16", shard_optimizer=True)
    by_plan = PipelineOptions().under(chosen)
    assert (by_plan.compute.precision, by_plan.shard_optimizer) == ("bf16", True)
    asked = PipelineOptions(compute=ComputeOptions("fp32"), shard_optimizer=False).under(chosen)
    assert (asked.compute.precision, asked.shard_optimizer) == ("fp32", False)
    assert not PipelineOptions(exact=True).under(chosen).shard_optimizer


def test_values_that_are_not_listed_are_refused() -> None:
    with pytest.raises(ValueError, match="check_batches is 'most'; it is 'sampled' or 'full'"):
        PipelineOptions(check_batches="most")  # type: ignore[arg-type]
