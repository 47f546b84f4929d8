"""Types of fields of both JSON formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from anabranch.files.jsonfile import LIMITS

Bytes = Annotated[float, Field(ge=0, le=LIMITS.size)]
Id = Annotated[int, Field(ge=0, le=2**53)]
NodeName = Annotated[str, Field(max_length=1000)]


def any_node_has(document: Mapping[str, Any], *keys: str) -> bool:
    """Whether a JSON document has a list of nodes, and one of the keys is in one of them."""
    nodes = document.get("nodes")
    return isinstance(nodes, list) and any(
        key in node for node in nodes if isinstance(node, dict) for key in keys
    )
