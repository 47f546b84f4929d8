"""Files and folders that a command is asked to write, refused before it has done anything.

Options name a check as their callback, so it is made while the command line is read.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from anabranch.errors import OutputError


def file_to_write(path: Path | None) -> Path | None:
    """Accept a file that is new, or may be written over, in a folder that exists."""
    if path is None:
        return None
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file in it")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise OutputError(f"{path} cannot be written over; name another file")
        return path
    folder = path.absolute().parent
    if not folder.exists():
        raise OutputError(
            f"{path} cannot be written: there is no folder {folder}; make it first, or name "
            "another file"
        )
    if why := why_not(folder):
        raise OutputError(f"{path} cannot be written: {why}; name another file")
    return path


def folder_to_write(path: Path | None) -> Path | None:
    """Accept a folder that exists or can be made."""
    if path is not None and (why := why_not(path)):
        raise OutputError(f"{path} cannot be written: {why}; name another folder")
    return path


def why_not(folder: Path) -> str:
    """Return the reason why a folder, or the nearest existing one above it, cannot be written to;
    empty if it can. A file is tried, as permissions do not tell if a disk is read-only.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file"
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there} takes no files ({error.strerror})"
