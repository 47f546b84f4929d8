"""The verb export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anabranch import launch
from anabranch.checkpoint import load_state_dict
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import built, plan


@pytest.mark.dist
def test_the_model_of_a_checkpoint_is_one_file(run, document, tmp_path: Path):
    """As JSON and as a line; what exists is never replaced."""
    model = built("Chain")

    def rank() -> None:
        chosen = plan(model, 2)
        Pipeline(model.workload, chosen, captured=model.captured).save(tmp_path / "run")

    launch.run(rank, 2, timeout=60.0)
    made = document("export", "run", "-o", "chain.safetensors")
    expected = load_state_dict(tmp_path / "run")
    found = load_file(made["path"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (made["tensors"], made["prefix"], made["architecture"]) == (len(expected), "", "")
    code, out, err = run("export", "run", "-o", "head", "--prefix", "head.")
    assert (code, "written to head: 2 tensors, 0.0 MiB, from run" in out) == (0, True)
    assert "8 tensors whose names do not begin with head. are left out" in err
    code, _, err = run("export", "run", "-o", "head")
    assert (code, "head exists" in err) == (1, True)
    made = document("export", "run", "-o", "trained.safetensors", "--trained")
    assert made["tensors"] == len(expected)
