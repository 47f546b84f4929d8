"""Rows of parameters that an optimizer updates in place of whole ones."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anabranch.cost.memory import deal
from anabranch.errors import TrainingError
from anabranch.runtime.data_parallel.shards import Shard, replace_parameters, shards_of
from anabranch.workload import BY_ELEMENT


def test_pieces_are_whole_rows() -> None:
    """Of ten rows of 64 bytes 300 and 340 are nearest to four and six, if two belong together; all
    or none are no shard.
    """
    parameter = torch.zeros(10, 16)
    assert shards_of(parameter, [(4, 300), (2, 340)]) == (Shard(4, 0, 4), Shard(2, 4, 10))
    assert shards_of(parameter, [(4, 600), (2, 40)]) == (Shard(4),)
    assert shards_of(parameter, [(4, 40), (2, 600)]) == (Shard(2),)
    assert shards_of(torch.tensor(1.0), [(3, 4)]) == (Shard(3),)
    assert shards_of(torch.zeros(0, 2), [(3, 0)]) == (Shard(3),)


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=2), min_size=1, max_size=6), st.integers(1, 5)
)
def test_every_row_is_in_one_piece(shapes: list[list[int]], replicas: int) -> None:
    """In their order, of a rank each, whatever the shapes are; no two parameters are cut alike,
    so a bucket of rows has one.
    """
    parameters = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in shapes]
    dealt = deal([parameter.nbytes for parameter in parameters], replicas)
    cut = []
    for parameter, given_ in zip(parameters, dealt, strict=True):
        shards = shards_of(parameter, given_)
        cut += [shards] if len(shards) > 1 else []
        assert len({shard.rank for shard in shards}) == len(shards)
        parts = [shard.of(parameter) for shard in shards]
        assert torch.equal(torch.cat(parts) if parameter.dim() else parts[0], parameter)
    assert len(set(cut)) == len(cut)


def test_rows_of_a_sparse_gradient() -> None:
    """As those of the whole one."""
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[0, 3, 4]]), torch.ones(3, 1), (6, 1), check_invariants=False
    )
    rows = Shard(0, 2, 5).of(gradient)
    assert rows.is_sparse
    assert torch.equal(rows.to_dense(), gradient.to_dense()[2:5])


def held(
    optimizer: torch.optim.Optimizer, name: str, shard: Shard, parameter: nn.Parameter
) -> nn.Parameter:
    """The rows that an optimizer has in the place of a parameter."""
    rows = nn.Parameter(shard.of(parameter.detach()))
    replace_parameters(optimizer, {parameter: {shard.name(name): rows}})
    return rows


def test_an_optimizer_that_needs_whole_parameters_gets_no_rows() -> None:
    """Where a recipe makes another one than for all that the rank holds."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(TrainingError, match=r"makes Adafactor for .* as table is shared; have it"):
        held(torch.optim.Adafactor([parameter]), "table", Shard(0, 0, 4), parameter)


HALVES = Shard(0, 0, 4), Shard(0, 4, 8)

CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind.__name__, {}) for kind in BY_ELEMENT if kind is not torch.optim.SparseAdam),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "fused": True}),
    ("AdamW", {"foreach": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adagrad", {"initial_accumulator_value": 0.5}),
]


def test_parts_of_one_parameter_count_their_steps_each() -> None:
    """Adagrad counts in a tensor from the start, and its rate falls with the count."""
    whole = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.Adagrad([whole], lr=0.1, lr_decay=0.5)
    parts = {shard.name("p"): nn.Parameter(shard.of(whole.detach()).clone()) for shard in HALVES}
    replace_parameters(optimizer, {whole: parts})
    for part in parts.values():
        part.grad = torch.ones_like(part)
    optimizer.step()
    optimizer.step()
    first, second = parts.values()
    assert torch.equal(first, second)
    assert optimizer.state[first]["step"] == 2


def stepped(ways: list[tuple[torch.optim.Optimizer, Tensor, Shard]], whole: Tensor) -> Tensor:
    """The parameter, once optimizers have made four updates, each of its rows."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        gradient = torch.randn(whole.shape, generator=generator)
        for optimizer, parameter, shard in ways:
            parameter.grad = shard.of(gradient)
            optimizer.step()
    return whole.detach()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_optimizers_update_each_element_by_itself(name: str, options: dict[str, Any]) -> None:
    """Rows that several of them hold become, bit for bit, those that one makes of the whole, and
    their state is as large.
    """
    make = getattr(torch.optim, name)
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(13, 8))
    cut = nn.Parameter(whole.detach().clone())
    alone = make([whole], lr=0.1, **options)
    ways: list[tuple[torch.optim.Optimizer, Tensor, Shard]] = []
    half = whole.nbytes // 2
    for shard in shards_of(whole, [(0, half), (1, half)]):
        optimizer = make([cut], lr=0.1, **options)
        rows = held(optimizer, "p", shard, cut)
        ways.append((optimizer, rows, shard))
    assert torch.equal(stepped(ways, cut), stepped([(alone, whole, Shard(0))], whole))
    assert len(ways) == 2
    for optimizer, rows, shard in ways:
        for key, value in alone.state[whole].items():
            if isinstance(value, Tensor):
                expected = shard.of(value) if value.dim() else value
                assert torch.equal(optimizer.state[rows][key], expected), key
