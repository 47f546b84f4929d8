"""Captured models, kept between commands, so that planning again does not capture again.

A kept capture is a checksum and, in the next line, a JSON document with the operators and kernels
for an estimate. The name of the file is a hash of the model's name and options, the granularity,
the folders of modules, and the versions of Python, this package and all installed ones. The
document lists the user's own files that were imported or read during the capture, with a hash of
each. If one has changed, the model is captured again.

Models whose code is in no file (generated code) are not kept. Environment and time do not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from anabranch.errors import CaptureError, warn
from anabranch.files.cache_folder import private_folder
from anabranch.files.jsonfile import read_regular, write_whole
from anabranch.profile.kernel_trace import TracedModel, checked_counts
from anabranch.profile.profile import Profile

if TYPE_CHECKING:
    from torch import nn

    from anabranch.graph.capture import Captured
    from anabranch.workload import Workload

MOST_KEPT = 200
"""Most captures that are kept; the least recently used go first. The capture of mmt in the
published size, with 97 operators and 3,000 kernels, has 0.4 MB."""


@dataclass(frozen=True)
class KeptCapture:
    """A captured model, and the files on which it depends.

    Attributes:
        files: the user's own files -> hashes of their bytes.
    """

    traced: TracedModel
    files: dict[str, str]


_PACKAGE = Path(__file__).parents[1]
_PLACES = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _PACKAGE
_NOT_OWN = ("/proc/", "/sys/", "/dev/", *(f"{place}{os.sep}" for place in _PLACES))


def estimated(
    model: str,
    build: Callable[[], Workload],
    capture: Callable[[Workload], Captured],
    device: str,
    samples: Sequence[int],
    *,
    settings: Sequence[str] = (),
    keep: bool = True,
    on_kept: Callable[[], object] = lambda: None,
) -> Profile:
    """Return the profile of ``profile.estimate.estimate``, by a kept capture or a new one.

    Args:
        model: name of the model that ``build`` builds.
        settings: everything else on which its operators depend, as text.
        keep: read and write kept captures; a damaged one is named in a warning, and made again.
        on_kept: called if a kept capture is used.
    """
    checked_counts(device, samples, "float32")
    path = _path([model, *settings]) if keep else None
    kept = None if path is None else _load(path, model)
    if kept is not None:
        on_kept()
        return kept.traced.profile(device, samples, "float32")

    from anabranch.profile.estimate import estimate, trace

    with files_read() as read:
        workload = build()
        with warnings.catch_warnings(record=True) as caught:
            captured = capture(workload)
            traced = None
            with suppress(CaptureError):  # ``estimate`` below explains a model without one sample
                captured.programs.at(1, device="meta")
                traced = trace(captured)
    for warning in caught:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    if traced is None or not traced.is_affine:
        return estimate(captured, device, samples)
    if path is not None and not caught and _is_in_files(workload.module):
        # A folder that is full or read-only is no error, nor a path that is no text.
        with suppress(OSError, ValueError):
            files = {name: _hash(name) for name in (*_own_modules(), *_own(read))}
            save_capture(KeptCapture(traced, files), path)
            by_use = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime)
            for oldest in by_use[:-MOST_KEPT]:
                oldest.unlink(missing_ok=True)
    return traced.profile(device, samples, "float32")


def save_capture(kept: KeptCapture, path: Path) -> None:
    """Write a captured model; raises OSError if that fails."""
    document = TypeAdapter(KeptCapture).dump_json(kept)
    write_whole(path, _checksum(path, document) + b"\n" + document)


def load_capture(path: Path) -> KeptCapture:
    """Read a captured model; raises ValueError if the file is no capture, was renamed or changed,
    and OSError if there is no regular file.
    """
    checksum, _, document = read_regular(path).partition(b"\n")
    if checksum != _checksum(path, document):
        raise ValueError(f"the checksum in {path} is another one than that of what it holds")
    return TypeAdapter(KeptCapture).validate_json(document)


def _checksum(path: Path, document: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + document).hexdigest().encode()


def _path(names: Any) -> Path | None:
    """Return the file of a capture; None if it cannot be kept safely."""
    folder = private_folder("captures")
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    for place in sorted({place for place in sys.path if place.endswith("-packages")}):
        for path in sorted(Path(place).glob("*.dist-info")):  # name and version, and when
            digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
    where = os.getcwd(), os.environ.get("PYTHONPATH", "")
    digest.update(json.dumps([names, sys.version, where]).encode())
    return None if folder is None else folder / f"{digest.hexdigest()}.json"


def _load(path: Path, model: str) -> KeptCapture | None:
    """Return the capture in a file, if there is one and no file on which it depends has changed."""
    try:
        if not path.is_file():  # a pipe would never end
            path.unlink(missing_ok=True)
            return None
        kept = load_capture(path)
        os.utime(path)  # most recently used
        same = all(_hash(name) == digest for name, digest in kept.files.items())
        return kept if same else None
    except ValueError as error:
        warn(f"the kept capture of {model} is damaged and is made again: {error}")
    except OSError:  # one of the files is gone
        pass
    return None


def _is_in_files(module: nn.Module) -> bool:
    """Return True if the code of every part of a module is in a file."""
    codes = [getattr(type(part).forward, "__code__", None) for part in module.modules()]
    return all(code is not None and os.path.isfile(code.co_filename) for code in codes)


def _own_modules() -> set[str]:
    """Return the files of imported modules that are the user's own."""
    modules = [module for name, module in sys.modules.items() if name != "__main__"]
    # torch.ops and the like name a file without a folder, and are not loaded from it.
    return _own(file for m in modules if os.path.isabs(file := getattr(m, "__file__", None) or ""))


def _own(names: Iterable[str]) -> set[str]:
    """Return the regular files that belong neither to Python nor to an installed package."""
    return {
        name
        for name in names
        if not name.startswith(_NOT_OWN)
        and not {"site-packages", "dist-packages"} & set(Path(name).parts)
        and not name.endswith(".pyc")
        and os.path.isfile(name)
    }


def _hash(name: str) -> str:
    """Return a hash of a file's bytes; OSError if it is no regular file."""
    return hashlib.sha256(read_regular(Path(name))).hexdigest()


_read: set[str] = set()
_listeners = 0


@contextmanager
def files_read() -> Iterator[set[str]]:
    """Collect the files that are opened for reading.

    The set has files of earlier uses as well: an imported module does not read its files again.
    """
    global _listeners
    _listen()
    _listeners += 1
    try:
        yield _read
    finally:
        _listeners -= 1


@cache
def _listen() -> None:
    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if not _listeners or event != "open":
            return
        name, _, flags = arguments
        if isinstance(name, str | bytes) and not flags & (os.O_WRONLY | os.O_RDWR):
            _read.add(os.path.abspath(os.fsdecode(name)))

    sys.addaudithook(hear)  # once for good: a hook cannot be removed
