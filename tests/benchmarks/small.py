"""A model that is small in whatever preset a benchmark asks for."""

from typing import Any

from anabranch.models import build
from anabranch.workload import Workload


def small_two_branch(name: str, **options: Any) -> Workload:
    """Two branches of one layer, in place of any built-in model."""
    return build("two-branch", preset="small", options={"layers": "1"})
