"""Measuring: the right figures in the right places, and the user's model as it was."""

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.errors import CaptureError, ProfileError
from anabranch.graph.capture import Captured, capture
from anabranch.profile.estimate import estimate
from anabranch.profile.measure import Measurement, _Copies, measure
from tests.profile.tiny import MODELS, Normed, captured_towers, convolutions


@pytest.fixture(scope="module")
def towers() -> Captured:
    return captured_towers()


def test_every_operator_at_every_count(towers: Captured) -> None:
    """One cost per operator, one figure per count; whatever computes takes time."""
    profile = measure(towers, (4, 1, 2, 2), repeats=1)
    assert profile.samples == (1, 2, 4)
    assert profile.graph == towers.graph
    assert profile.graph.granularity == towers.granularity == "layer"
    assert profile.origin == "measured, cpu, at 1, 2, 4 samples"
    for op, cost in zip(profile.graph.ops, profile.costs, strict=True):
        assert len(cost.forward_s) == len(cost.backward_s) == 3
        assert min(cost.forward_s) > 0, op.name


class Stages(nn.Module):
    """Three linear layers of 10 with exp between them; the sum is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)).exp()).sum(1).mean()


def test_kept_bytes_by_hand() -> None:
    """Per sample and operator, 40 bytes for each tensor of ten floats that autograd saves.

    a keeps nothing of its own, but its output is b's saved input: 40. exp saves its result, which
    c saves as well: 40, once. What is saved of the batch does not count.
    """
    torch.manual_seed(0)
    captured = capture(Stages(), {"x": torch.randn(2, 10)}, granularity="operator")
    profile = measure(captured, (1, 4), repeats=0)
    assert sum(cost.kept_bytes for cost in profile.costs) == 80
    assert profile.costs[captured.graph.index["a"]].kept_bytes == 40


class Halved(Stages):
    """The same under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_casts_of_weights_are_kept_whatever_the_samples() -> None:
    """A backward reads the weight in half precision, 2 bytes for each of 100, and those of inputs;
    without gradients before a, nothing reads its weight again.
    """
    torch.manual_seed(0)
    captured = capture(Halved(), {"x": torch.randn(2, 10)}, granularity="operator")
    measured = measure(captured, (1, 4), repeats=0)
    estimated = estimate(captured, "v100", (1, 4))
    for profile in (measured, estimated):
        fixed = dict(zip((op.name for op in captured.graph.ops), profile.costs, strict=True))
        assert [fixed[name].kept_fixed_bytes for name in ("a", "b", "c")] == [0, 200, 200]


class _OperationClock(TorchDispatchMode):
    """A clock that goes on by a second with every operation of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seconds += 1
        return func(*args, **(kwargs or {}))


def test_gradients_of_weights_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in operations. Of b's backward only the product with the weight is left for its
    input, and a transpose; a is first, so all of its backward is for its weights; exp has none.
    """
    torch.manual_seed(0)
    captured = capture(Stages(), {"x": torch.randn(2, 10)}, granularity="operator")
    clock = _OperationClock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    with clock:
        profile = measure(captured, (2, 4), repeats=3, budget_s=1e9)
    costs = dict(zip(captured.graph.index, profile.costs, strict=True))
    assert costs["b"].backward_s[0] - costs["b"].weight_s[0] == 2
    assert costs["b"].weight_s[0] > 4
    assert costs["a"].weight_s == costs["a"].backward_s
    assert costs["exp"].weight_s == (0, 0)
    assert costs["exp"].backward_s[0] > 0


@pytest.mark.parametrize("name", MODELS)
def test_model_is_left_as_it_was(name: str) -> None:
    """Parameters, gradients, buffers, modes, random state and threads: all as before."""
    model, batch = MODELS[name]()
    captured = capture(model, batch)
    first = next(model.parameters())
    first.grad = torch.full_like(first, 7.0)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    measure(captured, (1, 3), repeats=1)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(first.grad, torch.full_like(first, 7.0))
    assert all(p.grad is None for p in itertools.islice(model.parameters(), 1, None))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert model.training


class Expert(nn.Module):
    """A queue of eight places, a frozen mean of a weight, and an expert of some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.mean = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.lerp_(self.first.weight, 0.5)
            place = int(self.place)
            self.queue[place : place + len(x)] = hidden
            self.place[0] = (place + len(x)) % 8
        (rows,) = torch.where(x[:, 0] > 0)
        chosen = torch.zeros_like(hidden).index_add(0, rows, self.expert(hidden[rows]))
        return (chosen @ (self.mean + self.queue.mean())).square().mean()


def test_state_is_that_of_the_model_at_every_count_and_afterwards() -> None:
    """After some steps of one sample, four would not fit into the queue. Of an expert's tokens no
    bytes are known.
    """
    model = Expert()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    profile = measure(capture(model, torch.randn(2, 4)), (1, 4), repeats=1)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(cost.waiting_bytes >= 0 for cost in profile.costs)


def test_model_is_left_as_it_was_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same if it breaks in the middle, here after the first turn."""
    model, batch = convolutions()
    captured = capture(model, batch)
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(captured, (1, 2), progress=interrupt)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Alike(nn.Module):
    """Four linear layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


def test_operators_that_are_alike_cost_the_same(
    towers: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooled, equal layers of a tower have equal figures; layers of other shapes do not. By a clock
    whose readings are ever further apart, so that no two operators take equally long by chance.
    """
    readings = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-9 * next(readings) ** 2)
    names = [op.name for op in towers.graph.ops]
    costs = dict(zip(names, measure(towers, (2,), repeats=1).costs, strict=True))
    pairs = [(n, n.replace("text.1", "image.1")) for n in names if n.startswith("text.1")]
    assert pairs
    # Sequences of 6 and of 9: other shapes, so not alike.
    assert all(costs[a].forward_s != costs[b].forward_s for a, b in pairs)
    captured = capture(Alike(), torch.randn(2, 10), granularity="operator")
    costs = dict(zip(captured.graph.index, measure(captured, (2,), repeats=1).costs, strict=True))
    assert costs["body.1"].forward_s == costs["body.2"].forward_s


def test_turns_between_other_things(towers: Captured) -> None:
    """A measurement by turns is a profile like any other; between them nothing is left behind."""
    measurement = Measurement(towers, (4, 2))
    for _ in range(2):
        measurement.turn()
        assert all(p.grad is None for p in towers.module.parameters())
    profile = measurement.profile()
    whole = measure(towers, (2, 4), repeats=0)
    assert (profile.samples, profile.graph, profile.origin) == (
        whole.samples,
        whole.graph,
        whole.origin,
    )
    assert [cost.kept_bytes for cost in profile.costs] == [c.kept_bytes for c in whole.costs]
    assert all(min(cost.forward_s) > 0 for cost in profile.costs)


def test_median_drops_a_busy_moment(towers: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps an hour in one of seven repeats leaves no trace in the figures."""
    real, calls = time.perf_counter, itertools.count()
    jump = 3 * len(towers.graph) * 4  # somewhere in the first timed steps

    def clock() -> float:
        return real() + (3600.0 if next(calls) >= jump else 0.0)

    monkeypatch.setattr(time, "perf_counter", clock)
    profile = measure(towers, (1,), repeats=7, budget_s=1e9)
    assert max(max(c.forward_s + c.backward_s) for c in profile.costs) < 60


def test_budget_leaves_out_large_counts(towers: Captured) -> None:
    """With no time at all the smallest count is still measured, and the rest is named."""
    with pytest.warns(UserWarning, match="2, 4 samples were not measured, for want of time"):
        profile = measure(towers, (1, 2, 4), budget_s=0.0)
    assert profile.samples == (1,)


def test_progress(towers: Captured) -> None:
    """Counts up to its total."""
    seen: list[tuple[int, int]] = []
    measure(towers, (1, 2), repeats=3, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [1, 2, 3, 4]
    assert {total for _, total in seen} == {4}


def test_meta_model_is_refused() -> None:
    """A model without numbers can only be estimated; the message says so."""
    with torch.device("meta"):
        captured = capture(Stages(), {"x": torch.empty(2, 10)})
    with pytest.raises(ProfileError, match=r"on the meta device, .* or plan it by the data sheet"):
        measure(captured, (1,))


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ((), {}, r"cannot measure 9 repeats at \[\] samples"),
        ((0,), {}, r"at \[0\] samples"),
        ((1,), {"repeats": -1}, "cannot measure -1 repeats"),
        ((1,), {"device": "mps"}, "cannot measure on mps; cpu and cuda are possible"),
    ],
)
def test_wrong_arguments(
    towers: Captured, samples: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    """What cannot be measured is refused before anything runs."""
    with pytest.raises(ValueError, match=message):
        measure(towers, samples, **options)  # type: ignore[arg-type]


def test_operators_are_copied_to_another_device() -> None:
    """Parameters and constructed tensors move with the copy; the original stays what it was."""
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(3))
    graph = fx.Graph()
    ones = graph.call_function(torch.ops.aten.ones.default, ([3],), {"device": torch.device("cpu")})
    weight = graph.get_attr("weight")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (weight, ones)),))
    module = fx.GraphModule(root, graph)
    (copied,) = _Copies(torch.device("meta"), module).of(module)()
    (original,) = module()
    assert copied.is_meta
    assert torch.equal(original, torch.ones(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(towers: Captured) -> None:
    """In words, with the way to a figure all the same."""
    with pytest.raises(ProfileError, match="no CUDA device here to measure on"):
        measure(towers, (1,), device="cuda")


def test_copies_share_their_tensors() -> None:
    """A model that just fits a GPU is measured there at any number of sample counts."""
    model = nn.Linear(2, 2)
    programs = [fx.symbolic_trace(model) for _ in range(2)]
    copies = _Copies(torch.device("meta"), model)
    first, second = (dict(copies.of(program).named_parameters()) for program in programs)
    assert list(map(id, first.values())) == list(map(id, second.values()))
    assert all(isinstance(tensor, nn.Parameter) and tensor.is_meta for tensor in first.values())


def test_a_gpu_of_another_number_is_another_device() -> None:
    """A model on the first GPU is copied to be measured on the second."""
    here = nn.Linear(2, 2, device="meta")
    assert _Copies(torch.device("cuda:1"), here)._needed
    assert not _Copies(torch.device("meta"), here)._needed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(towers: Captured) -> None:
    """Copies run there; the model stays here."""
    profile = measure(towers, (1, 4), device="cuda", repeats=3)
    assert profile.device == "cuda"
    assert min(min(c.forward_s) for c in profile.costs) > 0
    assert all(p.device.type == "cpu" for p in towers.module.parameters())


def test_counts_with_which_the_model_fails_are_left_out() -> None:
    """One line says so; with fewer than two others the user's own mistake is shown."""
    captured = capture(Normed(), {"x": torch.randn(4, 4)})
    with pytest.warns(UserWarning, match=r"Normed fails with 1 sample \(Expected more than 1"):
        profile = measure(captured, (1, 2, 4), repeats=1)
    assert profile.samples == (2, 4)
    with pytest.raises(CaptureError, match="works with 4 samples but not with 1 sample"):
        measure(captured, (1, 4), repeats=1)
    assert measure(captured, (3,), repeats=1).samples == (3,)


def test_estimates_leave_them_out_as_well() -> None:
    """So that nobody plans a micro-batch of one sample for it."""
    captured = capture(Normed().to("meta"), {"x": torch.randn(4, 4)})
    with pytest.warns(UserWarning, match="no device is planned to get fewer"):
        assert estimate(captured, "v100", (1, 2, 4)).samples == (2, 4)
