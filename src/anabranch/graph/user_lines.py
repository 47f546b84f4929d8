"""Lines of the source at which the user's forward calls an operation, for messages."""

from __future__ import annotations

import linecache
import os
import re
import textwrap
import traceback
from collections.abc import Iterable
from types import FrameType

import torch
from torch import fx, nn

from anabranch import errors
from anabranch.graph.flat_program import frame

TORCH = os.path.join(torch.__path__[0], "")
"""Folder of PyTorch's own files, with a separator at its end."""

_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__))
_OURS = tuple(os.path.join(_PACKAGE, room, "") for room in ("graph", "runtime"))


def user_frame(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return file and line of the innermost frame that is not torch's, Python's own or ours."""
    place = "the module's forward"
    for entry in stack:
        if _is_library(entry.filename):
            continue
        place = f"{entry.filename}:{entry.lineno}"
        if entry.line:
            place += f" ({textwrap.shorten(entry.line, 100)})"
    return place


def _is_library(file: str) -> bool:
    name = os.path.abspath(file)
    is_pythons = name.startswith(_PYTHON) and "site-packages" not in name
    return is_pythons or name.startswith((TORCH, *_OURS)) or file.startswith("<")


def forward_trace(frame: FrameType | None) -> str:
    """Return the innermost forward, the user's or a library's, that a frame is in, as the text of a
    stack trace; empty outside of one.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and not _is_library(code.co_filename):
            return f'File "{code.co_filename}", line {frame.f_lineno}, in forward\n'
        frame = frame.f_back
    return ""


def user_line(node: fx.Node) -> str:
    """Return file and line of the innermost forward, the user's or a library's, of a call."""
    trace = re.findall(r'File "(.+)", line (\d+), in (.+)\n', node.meta.get("stack_trace") or "")
    return user_frame(traceback.FrameSummary(file, int(line), name) for file, line, name in trace)


def call_place(module: nn.Module, node: fx.Node) -> str:
    """Return the module that an operation is called in, with its class, and the line."""
    path = frame(node).partition("[")[0]
    owner = type(module.get_submodule(path)).__name__
    return f"in {path} ({owner}), {user_line(node)}" if path else f"in {owner}, {user_line(node)}"


def frame_place(frame: FrameType) -> str:
    """Return file, line and text of the line that a frame is at."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" ({text})" if text else "")
