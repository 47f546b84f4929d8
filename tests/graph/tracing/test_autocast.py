"""Autocast in the forward, whose casts become calls that a plan can cut between."""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.graph.flat_program import CALL, gradient_types
from anabranch.graph.tracing.library_rules import library_rules
from tests import losses
from tests.graph.chain import check_split, random_stages

HALF = torch.bfloat16


class Halves(nn.Module):
    """Layers in half precision with an island of full precision, a layer that is used twice, and
    operations that autocast runs in half, in full, and in the widest type of their inputs.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled
        self.first, self.twice, self.alone = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.table, self.last = nn.LayerNorm(8), nn.Embedding(5, 8), nn.Linear(16, 5)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF, enabled=self.enabled):
            h = self.twice(F.gelu(self.first(x)) + self.table(word))
            with torch.autocast("cpu", enabled=False):
                h = self.alone(h.float())
            h = self.twice(self.norm(h))
            shift = torch.einsum("ab,cb->ac", h, self.alone.weight)
            scores = self.last(torch.cat([h, x], -1)) + shift[:, :5].sigmoid()
            return F.cross_entropy(scores, word)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, 8), "word": torch.randint(5, (4,))}


@pytest.mark.parametrize("enabled", [True, False])
def test_cut_has_loss_and_gradients_of_the_module_under_autocast(enabled: bool) -> None:
    """Bitwise in exact mode: the same operations in the same types, weights cast once."""
    torch.manual_seed(0)
    captured = capture(Halves(enabled), batch(), granularity="operator")
    assert {"first", "twice", "alone", "norm", "table", "last"} <= {
        op.name.partition("#")[0] for op in captured.graph.ops
    }
    for seed in range(3):
        stages = random_stages(captured.graph, 4, seed)
        assert check_split(captured, batch(), stages, exact=True) == 0.0
    halves = gradient_types(captured.programs.example) & {HALF}
    assert bool(halves) == enabled


class Halved(nn.Module):
    """Layers with an island of full precision, attention, and a recurrent layer; perhaps called
    under autocast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_half = False
        self.first, self.alone, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.norm, self.table, self.memory = nn.LayerNorm(8), nn.Embedding(5, 8), nn.GRU(8, 8)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF) if self.is_half else nullcontext():
            h = F.gelu(self.first(x)) + self.table(word)
            with torch.autocast("cpu", enabled=False):
                h = self.norm(h + self.alone(x))
            q, k = (t.view(-1, 1, 2, 4) for t in (h, x))
            h = F.scaled_dot_product_attention(q, k, q).view(-1, 1, 8)
            h = self.memory(h.transpose(0, 1).float())[0][0]
            scores = self.last(h)
            scores = scores.masked_fill(scores > 1, torch.finfo(scores.dtype).min)
            return F.cross_entropy(scores, word)


def test_a_whole_model_under_autocast_is_cut_where_it_is_without() -> None:
    """Bitwise what the module is when it is called under autocast; also of a GPU that is not here,
    where other operations are cast.
    """
    torch.manual_seed(0)
    module = Halved()
    plain = capture(module, batch(), granularity="operator")
    with pytest.raises(ValueError, match="'bfloat16' is none of fp32, bf16, fp16"):
        plain.under_autocast("bfloat16", "cpu")  # type: ignore[arg-type]
    here, there = (plain.under_autocast("bf16", kind) for kind in ("cpu", "cuda"))
    assert plain.under_autocast("fp32", "cpu") is here.under_autocast("fp32", "cpu") is plain
    assert here.under_autocast("bf16", "cuda") is there
    for half in (here, there):
        assert (half.graph.ops, half.graph.edges) == (plain.graph.ops, plain.graph.edges)
        pairs = list(zip(half.graph.values, plain.graph.values, strict=True))
        assert all(a.consumers == b.consumers for a, b in pairs)
        assert {a.nbytes / b.nbytes for a, b in pairs} == {0.5, 1.0}
    module.is_half = True
    for seed in range(3):
        stages = random_stages(plain.graph, 4, seed)
        assert check_split(here, batch(), stages, exact=True) == 0.0


@pytest.mark.parametrize("name", ["aligned", "pairs of the chosen"])
def test_losses_of_sizes_that_depend_on_the_data_are_cast(name: str) -> None:
    """Also those of connectionist temporal classification, in full precision by PyTorch's rules."""
    torch.manual_seed(0)
    module, leaves = losses.MODELS[name][0](), losses.batch(8)
    programs = capture(module, leaves).under_autocast("bf16", "cpu").programs
    found = programs.run(programs.example, programs.with_statistics(leaves))[0]
    with torch.autocast("cpu", HALF):
        expected = module(**leaves)
    expected = expected["loss"] if isinstance(expected, dict) else expected
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.0, check_dtype=False)


def test_casts_do_not_depend_on_the_device_of_a_program() -> None:
    """A program on the meta device, by which a model is estimated for a GPU, has the same calls."""
    captured = capture(Halves(), batch())
    here, there = (captured.programs.at(2, device=device) for device in ("cpu", "meta"))
    assert here.signature() == there.signature()


class Inside(nn.Module):
    """A recurrent layer, which autocast casts inside, and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            return self.head(self.cell(x)[0]).float().square().mean()


def test_what_autocast_casts_inside_of_an_operation_stays_under_it() -> None:
    """Its casts cannot come before it: one call of it is under autocast, the rest can be cut."""
    captured = capture(Inside(), torch.randn(4, 3, 4))
    assert len(captured.graph) == 2
    stages = [[op.name] for op in captured.graph.ops]
    assert check_split(captured, torch.randn(4, 3, 4), stages, exact=True) == 0.0


class Target(nn.Module):
    """A layer whose results are also a target without gradient, of the same batch."""

    def __init__(self, *, is_first: bool, is_enabled: bool) -> None:
        super().__init__()
        self.is_first, self.is_enabled = is_first, is_enabled
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def target(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return F.gelu(self.body(x)).mul_(2.0) + self.head.weight[0]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF, enabled=self.is_enabled):
            target = self.target(x) if self.is_first else None
            h = self.head(self.body(x))
            target = self.target(x) if target is None else target
            with torch.set_grad_enabled(False):
                weight = self.body.weight.abs().amax(0)
            return F.mse_loss((h * weight).float(), target.float())


@pytest.mark.parametrize(("is_first", "is_enabled"), [(True, True), (False, True), (True, False)])
def test_what_is_computed_without_gradients_under_autocast_gives_none(
    is_first: bool, is_enabled: bool
) -> None:
    """An exported program loses ``no_grad`` in a region of autocast, whichever use comes first."""
    torch.manual_seed(0)
    x = {"x": torch.randn(4, 8)}
    target = Target(is_first=is_first, is_enabled=is_enabled)
    captured = capture(target, x, granularity="operator")
    for seed in range(3):
        assert check_split(captured, x, random_stages(captured.graph, 4, seed), exact=True) == 0.0


class InPlace(nn.Module):
    """A dropout that writes to what a layer has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), 0.5, inplace=True)
        return F.dropout(self.second(h).relu_(), 0.5).square().mean()


def test_calls_have_the_places_that_they_have_without_casts() -> None:
    """Random numbers by sample go by them."""
    half = capture(InPlace(), torch.randn(4, 8)).under_autocast("bf16", "cpu")
    calls = half.programs.example.calls
    assert [node.meta[CALL] for node in calls if "dropout" in node.name] == [1, 4]


class FullHead(nn.Module):
    """A head that is computed in full precision, also under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with maybe_autocast(h.device.type, enabled=False):
            return self.head(h.float()).square().mean()


def test_modules_whose_import_is_blocked_have_no_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is not to be used."""
    monkeypatch.setitem(sys.modules, "blocked", None)
    with library_rules():
        assert sys.modules[__name__].maybe_autocast is torch.autocast


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_region_of_the_tensors_own_device_is_kept_in_full_precision(device: str) -> None:
    """transformers disables autocast only where it is enabled, which it never was in a trace; and
    torch has no autocast of the meta device, so such a model had no plan by a data sheet.
    """
    captured = capture(FullHead().to(device), {"x": torch.randn(4, 8)}).under_autocast(
        "bf16", "cpu"
    )
    whole = split(captured, [[op.name for op in captured.graph.ops]]).program(0, 4).module
    layers = whole.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [layer.meta["val"].dtype for layer in layers] == [HALF, torch.float32]
