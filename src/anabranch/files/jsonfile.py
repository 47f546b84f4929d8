"""One JSON document per file: read with suspicion, written whole or not at all.

Reading refuses things that JSON allows (a key twice, NaN, a number of 400 digits, another kind of
document) and names file, key path and value. Writing goes to a temporary file, which then replaces
the target. The types of fields of all kinds of files are here as well.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from anabranch.errors import FileFormatError


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest values in a file of ours, or of other programs; more is a mistake.

    Attributes:
        file_bytes: bytes of a file; the profile of 10,000 operators has about 5 MB.
        size: bytes in memory or in a message: an exbibyte.
        devices: devices of a cluster; a product of level sizes would quickly be more.
        seconds: seconds of an operator: thirty years.
        samples: samples of a batch.
        name: characters of a node's label in an operator's name; longer ones are cut.
    """

    file_bytes: int = 2**28
    size: int = 2**60
    devices: int = 10**6
    seconds: float = 1e9
    samples: int = 2**40
    name: int = 40


LIMITS = Limits()


FilePath = str | os.PathLike[str]

_WIDTH = 100


class Strict(BaseModel):
    """Model that converts no types and refuses unknown keys.

    Attributes:
        brief: fields that are left out at their defaults, which a reader fills in; True for all
            fields with a default.
    """

    brief: ClassVar[Collection[str] | bool] = ()
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,  # until a file of the kind is read or written
    )


_Model = TypeVar("_Model", bound=BaseModel)
_File = TypeVar("_File", bound=Strict)
_Core = TypeVar("_Core")


def document_fields(core: object, model: type[Strict], **special: Any) -> dict[str, Any]:
    """Return attributes as document keys, tuples as lists, also in objects inside. ``special`` has
    values that differ from the attributes.
    """
    document = {}
    for name, field in model.model_fields.items():
        value = _written(special[name] if name in special else getattr(core, name), field)
        is_brief = not field.is_required() and (model.brief is True or name in (model.brief or ()))
        if not is_brief or value != field.get_default(call_default_factory=True):
            document[field.alias or name] = value
    return document


def _written(value: Any, field: FieldInfo) -> Any:
    """Convert the value of an attribute for a document."""
    if isinstance(value, tuple):
        return [_written(item, field) for item in value]
    if not is_dataclass(value):
        return value
    model: Any = (get_args(field.annotation) or (field.annotation,))[0]  # in a list, or None
    return document_fields(value, model)


def from_document(kind: type[_Core], document: Strict, **special: Any) -> _Core:
    """Make an object of a core type from a document's fields, lists as tuples, also in objects
    inside, and from ``special`` fields.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    values = {name: value for name, value in document if name in hints} | special
    return kind(**{name: _read(value, hints[name]) for name, value in values.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return field -> type of a core type."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _read(value: Any, hint: Any) -> Any:
    """Convert the value of a document for an attribute of a type."""
    if isinstance(value, list):
        return tuple(_read(item, hint) for item in value)
    if not isinstance(value, Strict):
        return value
    kind: Any = (get_args(hint) or (hint,))[0]  # in a tuple, or None
    return from_document(kind, value)


def read_document(path: FilePath, schema: str, model: type[_Model]) -> _Model:
    """Read and validate one file, whose key ``schema`` has to be the expected one, such as
    ``anabranch.plan/1``; FileFormatError if there is no such file, or it is of another kind.
    """
    where = os.fspath(path)
    document = parse(read_text(Path(path)), where)
    _check_schema(document, schema, where)
    return validate(document, model, where)


def validate(document: Any, model: type[_Model], where: str, writer: str = "anabranch") -> _Model:
    """Validate a parsed document; FileFormatError has file, key path and value."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise FileFormatError(f"{where}: {describe_mistake(error, writer)}") from None


def write_document(path: FilePath, document: Mapping[str, Any]) -> None:
    """Write one file, equal bytes for equal documents; raises FileFormatError if that fails."""
    write_text(path, render(document) + "\n")


def write_text(path: FilePath, text: str) -> None:
    """Write one file whole or not at all; raises FileFormatError if that fails."""
    target, data = Path(os.path.realpath(path)), text.encode()
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            # A device such as /dev/stdout must not be replaced by a file; a folder raises here.
            target.write_bytes(data)
        else:
            write_whole(target, data)
    except OSError as error:
        raise FileFormatError(f"{os.fspath(path)} cannot be written: {error.strerror}") from error


def render(value: Any, indent: int = 0) -> str:
    """Render a value as JSON for people: everything that fits on a line stays on it."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, (dict, list)) or not value or 0 < indent <= _WIDTH - len(flat):
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        keys = [json.dumps(key, ensure_ascii=False) for key in value]
        items = [f"{k}: {render(v, indent + 2)}" for k, v in zip(keys, value.values(), strict=True)]
        begin, end = "{}"
    else:
        begin, end = "[]"
        items = [render(item, indent + 2) for item in value]
    if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
        lines = textwrap.fill(
            ", ".join(items),
            _WIDTH,
            initial_indent=pad,
            subsequent_indent=pad,
            break_on_hyphens=False,
        )
    else:
        lines = ",\n".join(pad + item for item in items)
    return f"{begin}\n{lines}\n{' ' * indent}{end}"


def describe_mistake(error: ValidationError, writer: str = "anabranch") -> str:
    """Describe the first mistake in a document: key path, value, and the expected value."""
    problems = error.errors(include_url=False)
    # A misspelt key is an unknown one and a missing one; the unknown one says more.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = key_path(first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "missing":
        return f"key {where} is missing{more}"
    if first["type"] == "extra_forbidden":
        return f"unknown key {where}; misspelt, or written by another version of {writer}{more}"
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    expected = expected.replace("a valid integer", "a whole number without point or exponent")
    return f"{where or 'the document'} is {shown(first['input'])}; {expected}{more}"


def key_path(parts: tuple[int | str, ...]) -> str:
    """Return the path of a value in a document, such as ``stages[3].devices[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def read_text(path: Path) -> str:
    """Read a file as text; FileFormatError if there is none, it is too large, or not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMITS.file_bytes + 1)
    except IsADirectoryError:
        raise FileFormatError(f"{path} is a folder; a file was expected") from None
    except FileNotFoundError:
        raise FileFormatError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = getattr(error, "strerror", None) or error
        raise FileFormatError(f"{str(path)!r} cannot be read: {why}") from None
    if len(data) > LIMITS.file_bytes:
        raise FileFormatError(
            f"{path} has more than {LIMITS.file_bytes} bytes, too many to be one of ours"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{path} is no text in UTF-8 (byte {error.start}), so none of the files read here"
        ) from None


def read_regular(path: Path) -> bytes:
    """Read the bytes of a file; raises OSError for a pipe, a device and others that may not end."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read()


def parse(text: str, where: str) -> Any:
    """Parse a JSON document; raises FileFormatError if it is none, or has a key twice."""
    if not text.strip():
        raise FileFormatError(f"{where} is empty; a JSON document was expected")
    twins: dict[int, str] = {}  # identity of an object -> its key that is written twice

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            twins[id(made)] = next(key for i, key in enumerate(keys) if key in keys[:i])
        return made

    try:
        document = json.loads(text, object_pairs_hook=keep)
        if twins:
            _refuse_twins(document, twins, (), where)
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{where} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise FileFormatError(f"{where} is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise FileFormatError(f"{where} holds an absurd number: {error}") from None
    return document


def _refuse_twins(
    value: Any, twins: Mapping[int, str], path: tuple[int | str, ...], where: str
) -> None:
    if isinstance(value, dict) and id(value) in twins:
        twin = key_path((*path, twins[id(value)]))
        raise FileFormatError(f"{where}: key {twin} is written twice")
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            _refuse_twins(item, twins, (*path, key), where)


def _check_schema(document: Any, schema: str, where: str) -> None:
    kind, version = schema.split("/")
    needed = f'{_article(kind)} is needed here, with "schema": "{schema}"'
    if not isinstance(document, dict):
        raise FileFormatError(f"{where} holds {shown(document)}; {needed}")
    if "schema" not in document:
        raise FileFormatError(f"{where} does not say what it is: key schema is missing; {needed}")
    named = document["schema"]
    if named == schema:
        return
    match = named.split("/") if isinstance(named, str) else []
    if len(match) == 2 and match[0] == kind:
        raise FileFormatError(
            f"{where} is in version {shown(match[1])} of the format {kind}; "
            f"this anabranch reads version {version}"
        )
    if len(match) == 2 and match[0].startswith("anabranch.") and match[0].isprintable():
        raise FileFormatError(f"{where} is {_article(match[0])} ({named[:80]}); {needed}")
    raise FileFormatError(f"{where}: schema is {shown(named)}; {needed}")


def _article(kind: str) -> str:
    return f"a {kind.removeprefix('anabranch.')[:40]}"


def shown(value: Any) -> str:
    """Return a value for a message: escaped, and not too long."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):  # nested deeply, or thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def write_whole(target: Path, data: bytes) -> None:
    """Write a file whole or not at all; raises OSError if that fails."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


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
Seconds = Annotated[float, Field(ge=0, le=LIMITS.seconds)]
Samples = Annotated[int, Field(ge=1, le=LIMITS.samples)]
Index = Annotated[int, Field(ge=0, lt=LIMITS.devices)]


def save(path: FilePath, model: type[Strict], document: Mapping[str, Any]) -> None:
    """Write a document; raises FileFormatError if that fails or it could not be read again."""
    try:
        model.model_validate(document)
    except ValidationError as error:
        raise FileFormatError(
            f"{os.fspath(path)} would not be readable: {describe_mistake(error)}"
        ) from None
    write_document(path, document)


def build(path: FilePath, construct: Callable[[_File], _Core], file: _File) -> _Core:
    """Construct the core type of a validated document; FileFormatError if it refuses the values."""
    try:
        return construct(file)
    except ValueError as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from None
