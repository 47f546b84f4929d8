"""Types of fields of all files, and the way from document to core type."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from anabranch.errors import FileFormatError
from anabranch.files.jsonfile import LIMITS, Strict, explain, write_document

FilePath = str | os.PathLike[str]


def _check_text(text: str) -> str:
    # Escape sequences and line breaks would reach terminals and reports; half a surrogate pair
    # cannot be encoded.
    if not text.isprintable():
        raise ValueError("it should not contain control characters")
    return text


def _check_name(name: str) -> str:
    # Names may end up in file names (of checkpoints, reports); none may point out of a folder.
    if name[0] in "/~" or "\\" in name or ".." in name.split("/") or re.match(r"[A-Za-z]:/", name):
        raise ValueError("it should be a name, not a path")
    return _check_text(name)


Text = Annotated[str, Field(max_length=2000), AfterValidator(_check_text)]
Name = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_check_name)]
NameOrNone = Annotated[
    str, Field(max_length=1000), AfterValidator(lambda name: name and _check_name(name))
]
"""A name, or the empty text."""
Size = Annotated[int, Field(ge=0, le=LIMITS.size)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Samples = Annotated[int, Field(ge=1, le=2**40)]
Index = Annotated[int, Field(ge=0, lt=LIMITS.devices)]


_File = TypeVar("_File", bound=Strict)
_Core = TypeVar("_Core")


def save(path: FilePath, model: type[Strict], document: Mapping[str, Any]) -> None:
    """Write a document; raises FileFormatError if that fails or it could not be read again."""
    try:
        model.model_validate(document)
    except ValidationError as error:
        raise FileFormatError(
            f"{os.fspath(path)} would not be readable: {explain(error)}"
        ) from None
    write_document(path, document)


def build(path: FilePath, construct: Callable[[_File], _Core], file: _File) -> _Core:
    """From the validated document to the core type; raises FileFormatError where one of its own
    conditions does not hold.
    """
    try:
        return construct(file)
    except ValueError as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from None
