"""The drawings of the documentation are what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.weights import POLICIES, draw
from tests.weights.test_policies import CHAIN, TWO_BRANCHES, graph_of

DOCS = Path(__file__).parents[2] / "docs" / "policies"


@pytest.mark.parametrize("edges", [CHAIN, TWO_BRANCHES])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_pages_show_what_is_read(name, edges):
    """Both tables of every page."""
    policy = POLICIES[name]()
    microbatches = 4 if policy.microbatches else 1
    table = draw(policy, graph_of(edges, 28), 7, microbatches=microbatches)
    assert f"```text\n{table}\n```" in (DOCS / f"{name}.md").read_text()


def test_every_policy_has_a_row_and_a_page():
    """In the order of the table of policies."""
    index = (DOCS / "index.md").read_text()
    rows = [index.index(f"| [`{name}`]({name}.md) |") for name in POLICIES]
    assert rows == sorted(rows)
    assert {page.stem for page in DOCS.glob("*.md")} == {"index", *POLICIES}


def test_a_table_by_eye():
    """Two stages under PipeOptim: one looks one update ahead, the other has nothing to predict."""
    assert draw(POLICIES["pipeoptim"](), graph_of(((0, 1),), 9), 3).splitlines() == [
        "         copies  mini-batch  0  1    2",
        "stage 0  2       F           0  0+1  1+1",
        "                 B           0  1    2",
        "stage 1  1       F           0  1    2",
        "                 B           0  1    2",
    ]
