"""Stages of a captured module: gradients, ports, parameters, and what must not be cut wrongly."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split, stages_like
from benchmarks.architectures.models import build
from tests.captured_models import captured_model
from tests.graph.chain import check_split, loss_of, random_stages, run_stages, taken
from tests.graph.nets import fan

# The gradients of one process


def test_four_random_stages_have_the_gradients_of_one_process() -> None:
    """Exactly in exact mode, to rounding otherwise; the loss exactly in both. Other models are cut
    in ``test_transparency``.
    """
    captured, batch = captured_model("GPT2")
    for seed in range(2):
        stages = random_stages(captured.graph, 4, seed)
        assert check_split(captured, batch, stages, exact=True) == 0.0
        assert check_split(captured, batch, stages, exact=False) < 1e-6


def test_finest_cut_has_the_gradients_of_one_process() -> None:
    """Every operator a stage of its own, at the finest granularity."""
    module, batch = build("GPT2")
    captured = capture(module, batch, granularity="operator")
    stages = [[op.name] for op in captured.graph.ops]
    assert check_split(captured, batch, stages, exact=True) == 0.0


class Wired(nn.Module):
    """A random graph of small layers: node i reads the earlier nodes ``wires[i]``."""

    def __init__(self, wires: list[list[int]], kinds: list[int]) -> None:
        super().__init__()
        self.wires, self.kinds = wires, kinds
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for inputs, kind, layer in zip(self.wires, self.kinds, self.layers, strict=True):
            h = sum(made[i] for i in inputs)
            if kind == 0:
                h = layer(h)
            elif kind == 1:
                h = h * torch.sigmoid(h)
            elif kind == 2:
                h = layer(h).mul_(2)
            else:
                h = self.layers[0](h).unflatten(1, (1, 5)).transpose(0, 1).tanh().squeeze(0)
            made.append(h * 0.5)
        return sum(h.pow(2).mean() for h in made[1:])


@st.composite
def wirings(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    n = draw(st.integers(3, 7))
    wires = [draw(st.lists(st.integers(0, i), min_size=1, max_size=3)) for i in range(n)]
    kinds = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    # Kind 1 has no parameters, and a loss without any cannot be trained.
    return wires, draw(kinds.filter(lambda drawn: set(drawn) != {1}))


@settings(max_examples=6, deadline=None)
@given(wiring=wirings(), seed=st.integers(0, 99), count=st.integers(2, 6))
def test_any_wiring_cut_anywhere(wiring: Any, seed: int, count: int) -> None:
    """Uses in any order on any stage, tied layers, operations in place: still the exact sums."""
    torch.manual_seed(seed)
    module = Wired(*wiring)
    batch = torch.randn(3, 5)
    captured = capture(module, batch, granularity="operator")
    stages = random_stages(captured.graph, count, seed)
    assert check_split(captured, batch, stages, exact=True) == 0.0
    assert check_split(captured, batch, stages, exact=False) < 1e-5


def test_order_of_sums_is_not_an_accident() -> None:
    """On the same stages plain mode rounds otherwise, so exact mode has something to do."""
    captured, batch = fan(), torch.randn(4, 5)
    stages = [[op.name] for op in captured.graph.ops]
    assert check_split(captured, batch, stages, exact=True) == 0.0
    assert 0 < check_split(captured, batch, stages, exact=False) < 1e-6


def test_shapes_have_the_samples_first() -> None:
    """A time-major value [time, samples, width] crosses as [samples, time, width]."""

    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x.transpose(0, 1)).tanh()).pow(2).mean()

    torch.manual_seed(0)
    captured = capture(TimeMajor(), torch.randn(4, 3, 5))
    stages = [["a"], ["b"]]
    assert check_split(captured, torch.randn(6, 3, 5), stages, exact=True) == 0.0
    program = split(captured, stages).program(1, 6)
    assert list(program.shapes.values()) == [(torch.Size([6, 3, 7]), torch.float32)]


def test_views_of_values_in_odd_layouts() -> None:
    """A transposed value is viewed on the other side, which only its own strides allow."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).transpose(1, 2).exp()
            return self.b(h.transpose(1, 2).view(-1, 6)).pow(2).mean()

    captured = capture(Odd(), torch.randn(4, 3, 5), granularity="operator")
    stages = [[op.name] for op in captured.graph.ops]
    for exact in (False, True):
        assert check_split(captured, torch.randn(4, 3, 5), stages, exact=exact) < 1e-6


def test_gradients_in_odd_layouts() -> None:
    """A convolution's value is contiguous, and its gradient is not, because its reader works on the
    transposed value; its bias adds up in the order of that memory. Whisper begins like this.
    """

    class Sound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(8, 16, 3), nn.LayerNorm(16)
            self.head = nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(x).exp().transpose(1, 2))).pow(2).mean()

    torch.manual_seed(0)
    captured = capture(Sound(), torch.randn(4, 8, 33), granularity="operator")
    stages = [[op.name] for op in captured.graph.ops]
    for samples in (1, 3):
        assert check_split(captured, torch.randn(samples, 8, 33), stages, exact=True) == 0.0


# Parameters, buffers, metrics


def test_stages_hold_the_models_own_parameters_under_its_own_names() -> None:
    """Not copies: the very objects, so that an optimizer of the module moves the stages."""
    captured, _ = captured_model("GPT2")
    own = dict(captured.module.named_parameters())
    parts = split(captured, random_stages(captured.graph, 4, 1))
    seen = set()
    for stage in range(4):
        held = dict(parts.program(stage, 2).module.named_parameters())
        assert held == parts.parameters(stage)
        assert all(parameter is own[name] for name, parameter in held.items())
        seen |= set(held)
    assert seen == set(own)
    assert set(parts.tied) == {"transformer.wte.weight"}


def test_state_of_the_stages_is_the_state_of_the_model() -> None:
    """Together the stages have the keys of the model's state, and nothing that is not saved."""
    module, batch = build("EmbeddingBags")
    module.register_buffer("scale", torch.ones(()))
    module.top[0].register_forward_pre_hook(lambda m, args: (args[0] * module.scale,))
    captured = capture(module, batch)
    parts = split(captured, random_stages(captured.graph, 3, 0))
    keys = [set(parts.program(s, 4).module.state_dict()) for s in range(3)]
    assert set().union(*keys) == set(module.state_dict())
    assert "pairs" not in set().union(*keys)
    assert sorted(n for s in range(3) for n in parts.buffers(s)) == ["pairs", "scale"]


def test_a_stage_runs_its_own_operators_only() -> None:
    """Calls of other stages are left out, free calls are copied to whoever needs them."""
    captured, _ = captured_model("GPT2")
    stages = [[op.name] for op in captured.graph.ops]
    parts = split(captured, stages)
    program = captured.programs.at(4)
    owners = captured.programs.grouping.owner_of(program)
    for stage in range(len(stages)):
        inside = {n.name for n in parts.program(stage, 4).module.graph.nodes}
        foreign = {n.name for n, owner in owners.items() if owner not in (-1, stage)}
        assert not inside & foreign


def test_statistics_are_updated_once_for_all_sizes() -> None:
    """Programs for different numbers of samples count in the model's one buffer."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.norm(self.a(x))).pow(2).mean()

    captured = capture(Norm(), torch.randn(4, 5), granularity="operator")
    stages = [[op.name] for op in captured.graph.ops]
    assert check_split(captured, torch.randn(4, 5), stages, exact=True) == 0.0
    before = int(captured.module.norm.num_batches_tracked)
    parts = split(captured, stages)
    for samples in (4, 3, 2):
        run_stages(parts, torch.randn(samples, 5))
    taken(captured.module)
    assert captured.module.norm.num_batches_tracked == before + 3


def test_metrics_come_from_where_they_are_made() -> None:
    """Loss and metrics need not be on one stage, and are those of the module. One of the batch
    alone needs no parameter, like a mask; what reads it further on is not copied either.
    """

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden, share = self.a(x), (x > 0).float().mean()
            loss = self.b(hidden * (share + 1)).mean()
            return {"loss": loss, "share": share, "hidden": hidden.mean()}

    captured = capture(Weighted(), torch.randn(4, 5), granularity="operator")
    stages = [[op.name] for op in captured.graph.ops]
    batch = torch.randn(4, 5)
    assert check_split(captured, batch, stages, exact=True) == 0.0
    loss, metrics = run_stages(split(captured, stages), batch)
    expected = {name: value.detach() for name, value in captured.module(batch).items()}
    assert {"loss": loss, **metrics} == expected
    assert not metrics["hidden"].requires_grad


def test_evaluation_is_cut_by_the_stages_of_training() -> None:
    """Loss of the module in evaluation mode, on the stages that training has."""
    captured, batch = captured_model("GPT2")
    evaluation = captured.evaluation()
    stages = stages_like(evaluation, random_stages(captured.graph, 4, 2))
    loss, _ = run_stages(split(evaluation, stages), batch, backward=False)
    with torch.no_grad():
        expected = loss_of(captured.module.eval(), batch)
    captured.module.train()
    assert torch.equal(loss, expected)


def test_a_call_of_training_alone_does_not_move_later_ones_of_its_module() -> None:
    """The first look-up is there for running means, so evaluation has the second one alone: it
    stays where training has it, and whatever stages cut that.
    """

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 1)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            self.norm(self.table(first).tanh())
            return self.head(self.table(second).tanh()).mean()

    tokens = torch.arange(4)
    captured = capture(Norms(), (tokens, tokens + 1), granularity="operator")
    assert [op.name for op in captured.graph.ops][2:] == ["norm", "table#2", "tanh#2", "head"]
    assert [op.name for op in captured.evaluation().graph.ops] == ["table#2", "tanh#2", "head"]


def test_a_head_of_training_alone_does_not_move_later_calls_of_other_modules() -> None:
    """Without it their names in the trace are others, but their numbers are not."""

    class Helped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper, self.twice = nn.Linear(4, 1), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            more = self.helper(x).mean() if self.training else 0.0
            return self.twice(self.twice(x).tanh()).mean() + more

    captured = capture(Helped(), (torch.randn(4, 4),), granularity="operator")
    kept = [op.name for op in captured.graph.ops if op.name != "helper"]
    assert [op.name for op in captured.evaluation().graph.ops] == kept


# Wrong stages


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ([["a", "b", "c", "d"]], "e is not once in the stages"),
        ([["a", "b", "c", "d", "e"], ["a"]], "a is not once in the stages"),
        ([["a", "b", "c", "d", "e", "f"]], "f is not once in the stages and once in the model"),
        ([["b", "c", "d", "e"], ["a"]], "a in stage 1 feeds b in stage 0"),
        ([["a", "c"], ["b", "d", "e"]], "b in stage 1 feeds c in stage 0"),
    ],
    ids=["missing", "twice", "unknown", "order", "not convex"],
)
def test_wrong_stages_are_refused(stages: list[list[str]], complaint: str) -> None:
    """The message names the operators."""
    with pytest.raises(ValueError, match=complaint):
        split(fan(), stages)


class Reserved(nn.Module):
    """Its parts have names that a GraphModule has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.graph, self.meta = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, 4] -> loss."""
        return self.meta(self.graph(self.code(x))).square().mean()


def test_parts_may_have_names_of_a_graph_module() -> None:
    """``code`` is an ordinary name for an encoder's output; it must neither fail nor be lost."""
    module = Reserved()
    captured = capture(module, torch.randn(4, 4))
    stages = [[op.name] for op in captured.graph.ops]
    parts = split(captured, stages)
    held = {id(p) for s in range(len(stages)) for p in parts.program(s, 4).module.parameters()}
    assert held == {id(p) for p in module.parameters()}
