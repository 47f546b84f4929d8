"""Batches of every form: names of their leaves, and what is refused."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.graph.opgraph import BATCH
from tests.graph.chain import run_stages
from tests.graph.nets import Anything, Net, batch, one_stage


@pytest.mark.parametrize(
    ("example", "names"),
    [
        (torch.ones(4, 2), ["batch"]),
        ((torch.ones(4), torch.ones(4, 2)), ["0", "1"]),
        ([torch.ones(4), [torch.ones(4, 2), None]], ["0", "1.0"]),
        ({"b": torch.ones(4), "a": {"x": torch.ones(4, 3)}, "double": True}, ["b", "a.x"]),
        (({"ids": torch.ones(4)}, torch.ones(4)), ["0.ids", "1"]),
    ],
    ids=["tensor", "tuple", "nested list", "dict", "dict in a tuple"],
)
def test_batches(example: Any, names: list[str]) -> None:
    """Leaves are named by their place; what is no tensor is a constant of the program."""
    module = Anything()
    captured = capture(module, example)
    from_batch = [v.name for v in captured.graph.values if v.producer == BATCH]
    own = [name for name in from_batch if name not in captured.programs.statistics]
    assert own == names == list(captured.layout.flatten(example))
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    args = args if isinstance(args, tuple | list) else (args,)
    loss, _ = run_stages(split(captured, one_stage(captured)), example)
    assert torch.equal(loss, module(*args, **kwargs).detach())


def test_batch_values_have_bytes_per_sample() -> None:
    """Six floats of 4 bytes and a label of 4 bytes per sample, never with a gradient."""
    values = {v.name: v for v in capture(Net(), batch()).graph.values if v.producer == BATCH}
    assert (values["0"].nbytes, values["1"].nbytes) == (24, 4)
    assert not values["0"].grad
    assert values["0"].batched


def test_entries_come_in_any_order_and_in_mappings_of_other_libraries() -> None:
    """As collators of transformers make them; the order is that of the example."""
    tensors = {"b": torch.ones(4), "a": torch.zeros(4, 3)}
    layout = capture(Anything(), UserDict({**tensors, "double": True})).layout
    for other in (UserDict, dict):
        flat = layout.flatten(other({"double": True, "a": tensors["a"], "b": tensors["b"]}))
        assert list(flat.items()) == list(tensors.items())
    assert layout.changed_values({"double": False, **tensors}) == [
        "double is False, but in the workload's example True"
    ]


@dataclass
class Pair:
    left: Tensor
    right: Tensor


@pytest.mark.parametrize(
    ("example", "complaint"),
    [
        ((torch.ones(4, 2), torch.ones(3)), r"0 \(4, 2\), 1 \(3,\)"),
        ((torch.ones(4), torch.tensor(1.0)), r"1 \(\)"),
        ((torch.ones(7), torch.ones(4)), r"0 has another number of entries .*EmbeddingBag"),
        ((torch.ones(8), torch.ones(4)), r"as a dict and say so: .*rows={NAME: 2}"),
        ({"x": torch.ones(8), "y": torch.ones(4)}, r"images, say so: .*rows={'x': 2}"),
        ((torch.ones(0, 2),), "no samples"),
        ((1, None), "holds no tensor"),
        (Pair(torch.ones(4), torch.ones(4)), r"register_dataclass\(Pair\)"),
        ({"a.b": torch.ones(4), "a": {"b": torch.ones(4)}}, r"two tensors .* are called a\.b;"),
    ],
    ids=[
        "other size",
        "scalar",
        "ragged",
        "packed, without names",
        "packed",
        "empty",
        "no tensor",
        "a class torch does not know",
        "a name twice",
    ],
)
def test_refuses_batches_without_common_samples(example: Any, complaint: str) -> None:
    """The message lists the shapes."""
    with pytest.raises(CaptureError, match=complaint):
        capture(Anything(), example)


def test_batch_of_another_form_is_refused() -> None:
    """Later batches have to be built like the example."""
    captured = capture(Anything(), (torch.ones(4), torch.ones(4)))
    with pytest.raises(ValueError, match=r"example holds 0, 1: it lacks 1;"):
        captured.layout.flatten((torch.ones(4),))


def test_a_list_with_an_entry_per_sample_is_refused_by_name() -> None:
    """Names of files, say, which a short batch has fewer of."""
    layout = capture(Anything(), {"x": torch.ones(4), "files": ["a", "b"]}).layout
    with pytest.raises(ValueError, match="differs in entries of files that are no tensors"):
        layout.flatten({"x": torch.ones(4), "files": ["a"]})
