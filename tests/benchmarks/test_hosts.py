"""Recipes for several hosts, as they are on their page."""

from pathlib import Path

import pytest

from benchmarks.hosts.__main__ import RECIPES, command_of, line_of

PAGE = Path(__file__).parents[2].joinpath("docs", "several-hosts.md").read_text()


def test_every_recipe_is_on_the_page():
    """The manifest can be read, and all lines train by the same plan; only ranks and steps of the
    run here differ.
    """
    pytest.importorskip("yaml")
    lines = {name: line_of(recipe, PAGE) for name, recipe in RECIPES.items()}
    assert command_of(PAGE)[:3] == ["torchrun", "--nnodes=2", "--nproc-per-node=4"]
    train = "-m anabranch train mymodel:workload --plan"
    for name, line in lines.items():
        assert train in line.replace("--plan=", "--plan "), name
        assert "plan.json --steps 20 --json" in line, name
        assert ("--nproc-per-node" in line) == (name != "operator"), name
    assert lines["slurm"].startswith("srun --nodes 2 --ntasks-per-node 1 bash -c 'torchrun")
    assert lines["slurm"].endswith("--json'")
