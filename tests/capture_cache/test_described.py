"""Descriptions of built modules: what changes them, and what has none."""

from __future__ import annotations

import cmath
import math
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.capture_cache.described import UncertainError, _Describer, described
from anabranch.workload import Workload

HERE = __name__


@dataclass
class Config:
    """A user's settings."""

    width: int = 4
    act: str = "relu"


class Plain:
    """An object with attributes."""

    factor = 1

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Net(nn.Module):
    """A user's module."""

    def __init__(self, width: int = 4, **attributes: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 1)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean()


def of(module: nn.Module) -> Any:
    return _Describer(frozenset({HERE})).value(module.to("meta"))


def test_equal_modules_have_equal_descriptions() -> None:
    """Built anew, with other random parameters."""
    assert of(Net()) == of(Net())
    settings = {"config": Config(), "plain": Plain(a=[1, (2.0, None)]), "act": nn.functional.relu}
    assert of(Net(**settings)) == of(Net(**{**settings, "config": Config()}))


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.first, "in_features", 5),
        lambda net: setattr(net, "config", Config(act="gelu")),
        lambda net: setattr(net, "plain", Plain(a=[1, (2.0, 3)])),
        lambda net: setattr(net, "act", nn.functional.silu),
        lambda net: setattr(net, "mask", torch.zeros(3)),
        lambda net: net.second.eval(),
        lambda net: net.second.requires_grad_(False),
        lambda net: setattr(net.second, "bias", None),
        lambda net: setattr(net, "alias", net.first),
        lambda net: net.first.register_forward_hook(print),
        lambda net: setattr(net, "name", re.compile("a" * 300 + "c")),
        lambda net: setattr(net, "sizes", defaultdict(float)),
        lambda net: setattr(net, "size_of", {"a": 2}.get),
        lambda net: setattr(net, "root", cmath.sqrt),
        lambda net: setattr(net, "table", nn.Parameter(torch.zeros(2, 3).T)),
        lambda net: setattr(Plain, "factor", 2),
    ],
)
def test_whatever_may_change_a_capture_changes_it(
    change: Callable[[Net], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attribute, a setting in an object, a function, a mode, a tied part, a class's value; a
    long pattern, what a dict makes, what a method is bound to, a module of functions, strides.
    """
    monkeypatch.setattr(Plain, "factor", 1)
    settings = {
        "config": Config(),
        "plain": Plain(a=[1, (2.0, None)]),
        "act": nn.functional.relu,
        "mask": torch.ones(3),
        "name": re.compile("a" * 300 + "b"),
        "sizes": defaultdict(int),
        "size_of": {"a": 1}.get,
        "root": math.sqrt,
        "table": nn.Parameter(torch.zeros(3, 2)),
    }
    net = Net(**settings)
    before = of(Net(**settings))
    change(net)
    assert of(net) != before


@pytest.mark.parametrize(
    "value",
    [lambda x: x, random.Random(0), torch.Generator(), {Plain()}, open, iter([1]), sys.stdout],
    ids=["lambda", "random", "generator", "set", "open", "iterator", "file"],
)
def test_what_has_no_certain_description_is_refused(value: Any) -> None:
    """Such a model is captured each time."""
    if value is open:
        assert of(Net(value=value)) == of(Net(value=value))  # a function of Python's own
        return
    with pytest.raises(UncertainError):
        of(Net(value=value))


def test_a_workload_with_the_values_in_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Globals that a forward may read count, the values of the example do not; code that reads the
    environment is refused.
    """
    path = tmp_path / "mine_described.py"
    path.write_text("LAYERS = 2\n")
    module = type(sys)("mine_described")
    module.LAYERS = 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine_described", module)
    files = {"mine_described": path}
    example = {"x": torch.randn(2, 4)}
    workload = Workload(nn.Sequential(nn.Linear(4, 1)), example)
    before = described(workload, files)
    assert described(replace(workload, example={"x": torch.randn(2, 4)}), files) == before
    assert described(replace(workload, example={"x": torch.randn(3, 4)}), files) != before
    module.LAYERS = 3  # type: ignore[attr-defined]
    assert described(workload, files) != before
    path.write_text("import os\nLAYERS = int(os.environ['LAYERS'])\n")
    with pytest.raises(UncertainError, match="mine_described reads environ"):
        described(workload, files)
