"""Plans that a policy is not defined for, and recommendations."""

import warnings
from dataclasses import replace

import pytest

from anabranch.errors import PolicyError
from anabranch.plans.stages import StageGraph
from anabranch.weights import (
    OPTIMIZERS,
    POLICIES,
    OptimizerFacts,
    PipeOptim,
    SpecTrain,
    Stash,
    TwoBuffers,
    VerticalSync,
    keeps,
)
from anabranch.weights.requirements import (
    optimizer_remark,
    recommend,
    require_fits,
    require_optimizer,
)
from anabranch.weights.version_tracker import predicts
from tests.weights.test_policies import CHAIN, TWO_BRANCHES, graph_of


def replicated(graph: StageGraph) -> StageGraph:
    """The first stage on two devices."""
    first = replace(graph.stages[0], devices=(0, 100))
    return replace(graph, stages=(first, *graph.stages[1:]))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_fits_a_chain_and_a_graph(name):
    """Without a warning."""
    policy = POLICIES[name]()
    microbatches = 4 if policy.microbatches else 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for edges in (CHAIN, TWO_BRANCHES):
            require_fits(policy, graph_of(edges, 16), microbatches=microbatches)


def test_two_buffers_need_as_many_microbatches_as_the_pipeline_is_deep():
    """With fewer a third version would be needed; the message has both numbers."""
    with pytest.raises(PolicyError, match=r"3 < 4; choose 4 or more micro-batches"):
        require_fits(TwoBuffers(), graph_of(CHAIN, 16), microbatches=3)


def test_other_policies_learn_after_every_pass():
    """Micro-batches are refused where they would not be what the policy says."""
    with pytest.raises(PolicyError, match=r"stash makes an update after every pass.*4 micro"):
        require_fits(Stash(), graph_of(CHAIN, 16), microbatches=4)


def test_vertical_sync_needs_one_sequence_of_versions():
    """Replicas in turn have versions of their own; splitting a mini-batch is fine, and so are turns
    where no stage has replicas.
    """
    graph = replicated(graph_of(CHAIN, 16))
    require_fits(VerticalSync(), graph, microbatches=1)
    with pytest.raises(PolicyError, match="stage 0 that take mini-batches in turn"):
        require_fits(VerticalSync(), graph, microbatches=1, round_robin=True)
    require_fits(Stash(), graph, microbatches=1, round_robin=True)
    require_fits(VerticalSync(), graph_of(CHAIN, 16), microbatches=1, round_robin=True)


def test_statistics_over_one_sample_are_warned_of():
    """BatchNorm over a pass of one sample per replica is noise, or nothing at all."""
    graph = replace(graph_of(CHAIN, 16), batch_size=2)
    with pytest.warns(UserWarning, match=r"norm takes its statistics.*stage 0 has 1: a batch of 2"):
        require_fits(PipeOptim(), replicated(graph), microbatches=1, batch_norms=["norm"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_fits(PipeOptim(), graph, microbatches=1, batch_norms=["norm"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"depth": 1}, "naive"),
        ({"depth": 4}, "pipeoptim"),
        ({"depth": 8}, "predict-stash"),
        ({"depth": 8, "batch_size": 16}, "2bw-ef"),
        ({"depth": 8, "batch_size": 16, "versions": 3}, "2bw-ef"),
        ({"depth": 8, "batch_size": 16, "versions": 2}, "pipeoptim"),
        ({"depth": 8, "batch_size": 15}, "predict-stash"),
        ({"depth": 4, "batch_size": 64}, "2bw-ef"),
        ({"depth": 4, "batch_size": 7}, "pipeoptim"),
        ({"depth": 2, "batch_size": 64}, "pipeoptim"),
        ({"depth": 8, "versions": 9}, "predict-stash"),
        ({"depth": 8, "versions": 8}, "pipeoptim"),
        ({"depth": 8, "versions": 1}, "naive"),
        ({"depth": 4, "momentum": False, "batch_size": 64}, "2bw"),
        ({"depth": 4, "momentum": False, "batch_size": 4}, "stash"),
        ({"depth": 4, "momentum": False, "batch_size": 4, "versions": 2}, "naive"),
    ],
)
def test_recommendations(arguments, expected):
    """By depth, memory and momentum; the reason is a sentence with the numbers it rests on."""
    arguments = {"momentum": True, **arguments}
    facts = OptimizerFacts("SGD", momentum=arguments.pop("momentum"), rule="momentum")
    name, reason = recommend(facts=facts, **arguments)
    assert name == expected
    assert len(reason) > 40


def test_nadam_with_a_long_momentum_stashes():
    """As AsyncPP does, where the copies have room; with a shorter one it is any optimizer."""
    nadam = OPTIMIZERS["nadam"]
    assert recommend(8, replace(nadam, decay=0.99), batch_size=64)[0] == "asyncpp"
    assert recommend(8, replace(nadam, decay=0.99), batch_size=64, versions=7)[0] == "2bw-ef"
    assert recommend(8, replace(nadam, decay=0.9), batch_size=64)[0] == "2bw-ef"
    assert recommend(2, nadam)[0] == "pipeoptim"


def test_a_kept_update_counts_as_a_copy():
    """Where predictions come from the last update, that needs memory and is in the reason."""

    def of(depth: int, versions: int | None) -> tuple[str, str]:
        return recommend(depth, OptimizerFacts("RMSprop"), versions=versions)

    name, reason = of(2, None)
    assert name == "pipeoptim"
    assert "the last update of RMSprop, which is kept," in reason
    assert "looks at most 1 update ahead" in reason
    assert "at most 3 copies" in reason
    assert of(2, 3)[0] == "pipeoptim"
    name, reason = of(2, 2)
    assert name == "naive"
    assert "memory for 2 of the 3 copies of the weights that a prediction" in reason
    assert of(8, 10)[0] == "predict-stash"
    assert "10 copies" in of(8, 10)[1]
    assert of(8, 9) == (
        "pipeoptim",
        "predict-stash would keep 10 copies of the weights and there is memory for 9; pipeoptim "
        "holds at most 3",
    )


def test_reasons_promise_no_number_of_micro_batches():
    """That is decided by the plan, which is made afterwards."""
    reason = recommend(3, OPTIMIZERS["sgd"], batch_size=16)[1]
    assert "a batch of 16 can be cut into micro-batches" in reason


def test_what_kind_of_policy_it_is():
    """The two tables of the policies' pages: whose backward reads what its forward read, and who
    extrapolates.
    """
    assert {name for name, make in POLICIES.items() if keeps(make())} == {
        "stash",
        "vertical-sync",
        "2bw",
        "predict-stash",
        "asyncpp",
        "basis-rotation",
        "2bw-ef",
    }
    assert {name for name, make in POLICIES.items() if predicts(make())} == {
        "spectrain",
        "pipeoptim",
        "predict-stash",
    }


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "other"])
def test_spectrain_takes_sgd_with_momentum_alone(name):
    """Said without any optimizer at hand."""
    require_optimizer(SpecTrain(), OPTIMIZERS["sgd-momentum"])
    require_optimizer(PipeOptim(), OPTIMIZERS[name])
    with pytest.raises(PolicyError, match="spectrain predicts with the momentum of SGD"):
        require_optimizer(SpecTrain(), OPTIMIZERS[name])


@pytest.mark.parametrize(("name", "instead"), [("sgd", "2bw or stash"), ("adam", "pipeoptim or")])
def test_spectrain_names_policies_that_would_do(name, instead):
    """Without a momentum the other predictions say nothing either."""
    with pytest.raises(PolicyError, match=f"choose {instead}"):
        require_optimizer(SpecTrain(), OPTIMIZERS[name])


def test_a_prediction_without_momentum_is_remarked():
    """And only that."""
    assert "policy pipeoptim: it predicts" in optimizer_remark(PipeOptim(), OPTIMIZERS["sgd"])
    assert "every prediction is the current weights" in optimizer_remark(
        PipeOptim(), OPTIMIZERS["sgd"]
    )
    assert optimizer_remark(PipeOptim(), OPTIMIZERS["adamw"]) == ""
    assert optimizer_remark(Stash(), OPTIMIZERS["sgd"]) == ""


@pytest.mark.parametrize(
    ("policy", "refused", "taken"),
    [
        ("asyncpp", ["sgd-momentum", "adam", "muon", "other"], ["nadam"]),
        ("basis-rotation", ["sgd", "sgd-momentum", "muon"], ["adam", "adamw", "nadam", "other"]),
        ("2bw-ef", [], ["sgd", "sgd-momentum", "adam", "muon", "other"]),
    ],
)
def test_optimizers_of_the_newer_methods(policy, refused, taken):
    """AsyncPP is NAdam; a rotation changes nothing where a step is the same in any basis; error
    feedback takes any optimizer. A refusal names the optimizer and a way on.
    """
    for name in taken:
        require_optimizer(POLICIES[policy](), OPTIMIZERS[name])
    for name in refused:
        with pytest.raises(PolicyError, match=f"^{policy} .*{OPTIMIZERS[name].name}.*choose stash"):
            require_optimizer(POLICIES[policy](), OPTIMIZERS[name])


def test_a_short_momentum_under_asyncpp_is_warned_of():
    """With the momentum that it counts on; nothing where it is not known."""
    asyncpp, nadam = POLICIES["asyncpp"](), OPTIMIZERS["nadam"]
    assert "a momentum of 0.99, and that of NAdam is 0.9 here" in optimizer_remark(
        asyncpp, replace(nadam, decay=0.9)
    )
    assert optimizer_remark(asyncpp, replace(nadam, decay=0.99)) == ""
    assert optimizer_remark(asyncpp, nadam) == ""
