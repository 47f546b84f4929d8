"""Meta tensors without the compiler."""

import subprocess
import sys

import pytest

from anabranch.graph.without_dynamo import without_dynamo

NORMALISE = """
import sys, torch
from torch.nn.functional import layer_norm
from anabranch.graph.capture import capture
from anabranch.graph.without_dynamo import without_dynamo
from anabranch.models.names import resolve

workload = resolve("mmt", preset="small", options={}, meta=True)
capture(workload.module, workload.example)
with without_dynamo():
    meta = layer_norm(torch.ones(2, 4, device="meta"), (4,))
print(tuple(meta.shape), "torch._dynamo" in sys.modules)
compiled = torch.compile(lambda x: layer_norm(x, (4,)), backend="eager")
print(compiled(torch.arange(4.0)).tolist() == layer_norm(torch.arange(4.0), (4,)).tolist())
print(tuple(layer_norm(torch.ones(3, 4, device="meta"), (4,)).shape))
"""


def test_a_capture_and_a_norm_on_meta_do_not_import_the_compiler():
    """The import takes longer than a capture, here of a mean over the labels that are not ignored;
    what comes later finds the real compiler.
    """
    said = subprocess.run(
        [sys.executable, "-c", NORMALISE], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["(2, 4) False", "True", "(3, 4)"]


def test_it_is_gone_after_an_error_as_well(monkeypatch):
    """Nobody else finds a module without a compiler in place of torch._dynamo."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with pytest.raises(AttributeError, match="optimize"), without_dynamo():
        sys.modules["torch._dynamo"].optimize()
    assert "torch._dynamo" not in sys.modules
