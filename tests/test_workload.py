"""A workload is a value: it is checked when made, and changed by making another one."""

import re
from dataclasses import FrozenInstanceError, replace
from functools import partial

import pytest
import torch

from anabranch.errors import WorkloadError
from anabranch.workload import Workload, adamw, to_meta


def test_a_workload_is_changed_by_replacing_it():
    """It is frozen; the new one has the same module, which is shown by itself only."""
    workload = Workload(torch.nn.Linear(2, 1), torch.ones(2, 2))
    with pytest.raises(FrozenInstanceError):
        workload.clip_norm = 1.0
    assert replace(workload, clip_norm=1.0).module is workload.module
    assert "Linear" not in repr(workload)


def test_the_default_optimizer_is_the_documented_one():
    """The docstring of Workload has its class and rate."""
    made = adamw([("w", torch.nn.Parameter(torch.zeros(1)))])
    assert isinstance(made, torch.optim.AdamW)
    (rate,) = re.findall("learning rate of ([0-9.]+) ", Workload.__doc__ or "")
    assert made.defaults["lr"] == float(rate)


def test_the_default_optimizer_takes_complex_parameters():
    """The one that makes one pass over each does not."""
    for dtype, fused in ((torch.float32, True), (torch.cfloat, False)):
        made = adamw([("w", torch.nn.Parameter(torch.ones(2, dtype=dtype)))])
        assert made.defaults["fused"] is fused


def test_to_meta_keeps_the_nesting():
    """What is no tensor stays."""
    batch = {"a": (torch.ones(2), [torch.zeros(3)]), "b": 4}
    result = to_meta(batch)
    assert isinstance(result["a"], tuple)
    assert isinstance(result["a"][1], list)
    assert result["a"][0].is_meta
    assert result["a"][1][0].shape == (3,)
    assert result["b"] == 4


def test_a_module_that_is_wrapped_for_another_way_to_train_is_refused():
    """Wherever it is inside; the message says what to leave out, and what does the same here."""
    compiled = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 1)))
    with pytest.raises(TypeError, match=r"not in OptimizedModule; leave torch.compile out; --comp"):
        Workload(compiled, torch.ones(2, 2))
    scripted = torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(2, 2)))
    with pytest.raises(TypeError, match=r"not in ScriptModule; leave torch.jit out"):
        Workload(scripted, torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"not in DataParallel; pass the module inside"):
        Workload(torch.nn.DataParallel(torch.nn.Linear(2, 1)), torch.ones(2, 2))


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_an_optimizer_where_its_recipe_should_be_is_refused_at_once(name):
    """Each rank makes one for its own stages, so that of the whole model is of no use; the message
    says what to write.
    """
    module = torch.nn.Linear(2, 1)
    made = torch.optim.AdamW(module.parameters())
    if name == "scheduler":
        made = torch.optim.lr_scheduler.StepLR(made, 1)
    kind = type(made).__name__
    said = rf"the {name} of a Workload is a function .* {name}=functools.partial\({kind}, ...\)"
    with pytest.raises(TypeError, match=said):
        Workload(module, torch.ones(2, 2), **{name: made})


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            lambda named: torch.optim.SGD(named, lr=0.1, momentun=0.9),
            r"raised at .*test_workload.py:\d+, in <lambda>: TypeError: .*'momentun'",
        ),
        (
            lambda named: torch.optim.SGD([p for p in named if p.ndim > 1], lr=0.1),
            r"raised at .*, in <listcomp>: AttributeError: 'tuple' object has no attribute 'ndim'",
        ),
        (partial(torch.optim.SGD, momentun=0.9), r"raised at functools.partial\(.*'momentun'"),
        (
            lambda named: torch.optim.SGD([p for n, p in named if "table" in n], lr=0.1),
            "raised at .*; of weight, bias, which are the parameters of one rank, it takes none",
        ),
        (lambda named: None, "returned a NoneType; it has to return an optimizer of torch.optim"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_said_with_its_place(recipe, said):
    """As of everything else that the user writes: in one paragraph, with file and line."""
    module = torch.nn.Linear(2, 1)
    workload = Workload(module, torch.ones(2, 2), optimizer=recipe)
    with pytest.raises(WorkloadError, match=f"the optimizer recipe of the Workload {said}"):
        workload.make_optimizer(list(module.named_parameters()))


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("names", [["weight"], ["bias"], ["weight", "bias"]])
def test_a_group_of_a_recipe_may_be_empty(names: list[str], strips: bool):
    """As of the parameters of one stage; torch has names for all groups or for none."""

    def recipe(named):
        groups = [[pair for pair in named if pair[0] == name] for name in ("weight", "bias")]
        if strips:
            groups = [[p for _, p in group] for group in groups]
        return torch.optim.AdamW([{"params": group} for group in groups])

    module = torch.nn.Linear(2, 1)
    workload = Workload(module, torch.ones(2, 2), optimizer=recipe)
    made = workload.make_optimizer([(n, p) for n, p in module.named_parameters() if n in names])
    found = [len(group["params"]) for group in made.param_groups]
    assert found == [int(name in names) for name in ("weight", "bias")]
    module(torch.ones(1, 2)).sum().backward()
    made.step()
