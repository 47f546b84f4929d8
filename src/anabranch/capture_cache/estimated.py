"""Estimated profiles by the capture that is kept, or by a new one, which then is kept."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from anabranch.capture_cache import store
from anabranch.capture_cache.key import builtin_key, own_modules, own_sources, workload_key
from anabranch.errors import CaptureError, FileFormatError
from anabranch.graph.opgraph import Granularity
from anabranch.profile.kernel_trace import TracedModel, checked_counts
from anabranch.profile.profile import Profile

if TYPE_CHECKING:
    from pathlib import Path

    from anabranch.workload import Workload


def estimated(
    model: str,
    build: Callable[[], Workload],
    device: str,
    samples: Sequence[int],
    *,
    preset: str,
    options: Mapping[str, str],
    granularity: str,
    keep: bool = True,
    on_kept: Callable[[], object] = lambda: None,
) -> Profile:
    """What ``profile.estimate.estimate`` gives for a model, which is captured if it has to be.

    Args:
        model: a built-in name or ``package.module:function``; with ``preset`` and ``options`` it is
            what ``build`` builds, on the meta device.
        device: with a data sheet.
        samples: sample counts.
        keep: read and write kept captures; a damaged one is said in a warning, and made again.
        on_kept: called where a kept capture is used.

    Raises:
        ValueError, CaptureError, WorkloadError: as ``build``, ``capture`` and ``estimate`` do.
    """
    checked_counts(device, samples, "float32")
    files: dict[str, Path] = {}
    key = None
    workload: Workload | None = None
    if keep and ":" not in model:
        key = builtin_key(model, preset, options, granularity)
    elif keep:
        workload = build()
        files = own_modules(sys.modules)
        key = _key_of(model, workload, files, granularity)
    if key is not None and (found := _kept(key, model)) is not None:
        on_kept()
        return found.profile(device, samples, "float32")

    from anabranch.capture_cache.file_watch import files_read
    from anabranch.graph.capture import capture
    from anabranch.profile.estimate import estimate, trace

    workload = workload or build()
    with files_read() as read, warnings.catch_warnings(record=True) as told:
        captured = capture(
            workload.module,
            workload.example,
            granularity=cast("Granularity", granularity),
            per_sample=workload.per_sample,
        )
        traced = None
        with suppress(CaptureError):  # a model that refuses one sample is told what to do each time
            captured.programs.at(1, device="meta")
            traced = trace(captured)
    for warning in told:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    if traced is None or not traced.is_affine:
        return estimate(captured, device, samples)
    later = own_modules(sys.modules).keys() - files.keys() if ":" in model else ()
    if key is not None and not (told or later or (read and ":" in model)):
        store.save(key, traced)
    return traced.profile(device, samples, "float32")


def _key_of(
    model: str, workload: Workload, files: Mapping[str, Path], granularity: str
) -> str | None:
    """The key of a user's model, None where there is none for certain."""
    from anabranch.capture_cache.described import UncertainError, described

    try:
        return workload_key(model, described(workload, files), own_sources(files), granularity)
    except (UncertainError, OSError, RecursionError):
        return None


def _kept(key: str, model: str) -> TracedModel | None:
    try:
        return store.load(key)
    except FileFormatError as error:
        warnings.warn(
            f"the kept capture of {model} is damaged and is made again: {error}", stacklevel=2
        )
        return None
