"""Damages to a checkpoint, drawn: none of them may load.

Two checkpoints of one run are there, so that files of one can be mixed with those of the other.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

Damage = Callable[[Path, Path, random.Random], str]
"""Damages a folder, with another checkpoint of the same run at hand; says what was done."""


def damaged(whole: Path, other: Path, target: Path, kind: str, seed: int) -> str:
    """Copy a checkpoint to ``target`` and damage the copy; what was done."""
    shutil.copytree(whole, target)
    return DAMAGES[kind](target, other, random.Random(seed))


def _shard(folder: Path, drawn: random.Random) -> Path:
    return drawn.choice(sorted(folder.glob("rank-*.safetensors")))


def _flip(path: Path, position: int, bit: int) -> str:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {position} of {path.name} flipped"


def _header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flipped_tensor(folder: Path, _: Path, drawn: random.Random) -> str:
    """One bit of the tensors."""
    path = _shard(folder, drawn)
    return _flip(path, drawn.randrange(_header_end(path), path.stat().st_size), drawn.randrange(8))


def flipped_header(folder: Path, _: Path, drawn: random.Random) -> str:
    """One bit of what says where the tensors of a file are."""
    path = _shard(folder, drawn)
    return _flip(path, drawn.randrange(_header_end(path)), drawn.randrange(8))


def zeroed(folder: Path, _: Path, drawn: random.Random) -> str:
    """A run of bytes, as a file system leaves it that lost a block."""
    path = _shard(folder, drawn)
    data = bytearray(path.read_bytes())
    while True:
        begin = drawn.randrange(_header_end(path), len(data))
        end = min(begin + drawn.choice([1, 8, 64, 512]), len(data))
        if any(data[begin:end]):
            data[begin:end] = bytes(end - begin)
            path.write_bytes(data)
            return f"bytes {begin} to {end} of {path.name} zeroed"


def cut(folder: Path, _: Path, drawn: random.Random) -> str:
    """The end of a file, or the whole file, is missing."""
    path = drawn.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    most = len(data.rstrip())  # a manifest ends in a line break, which says nothing
    length = drawn.choice([0, drawn.randrange(most), most - 1])
    path.write_bytes(data[:length])
    return f"{path.name} cut to {length} bytes"


def longer(folder: Path, _: Path, drawn: random.Random) -> str:
    """Bytes behind the end."""
    path = _shard(folder, drawn)
    path.write_bytes(path.read_bytes() + drawn.randbytes(drawn.randint(1, 64)))
    return f"bytes behind the end of {path.name}"


def missing(folder: Path, _: Path, drawn: random.Random) -> str:
    """A file is not there."""
    path = drawn.choice(sorted(folder.iterdir()))
    path.unlink()
    return f"{path.name} removed"


def other_step(folder: Path, other: Path, drawn: random.Random) -> str:
    """One file is that of another step."""
    path = drawn.choice(sorted(folder.iterdir()))
    shutil.copy(other / path.name, path)
    return f"{path.name} of another step"


def swapped(folder: Path, _: Path, drawn: random.Random) -> str:
    """Two ranks' files have each other's name."""
    first, second = drawn.sample(sorted(folder.glob("rank-*.safetensors")), 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    return f"{first.name} and {second.name} swapped"


def lost_tensor(folder: Path, _: Path, drawn: random.Random) -> str:
    """A tensor is missing, in a file or in the manifest or in both."""
    path, where = _shard(folder, drawn), drawn.choice(["file", "manifest", "both"])
    tensors = load_file(path)
    key = drawn.choice(sorted(key for key in tensors if key.startswith("optimizer/exp_avg/")))
    if where != "manifest":
        del tensors[key]
        save_file(tensors, path)
    if where != "file":
        _edit(folder, lambda manifest: manifest["tensors"].pop(key))
    return f"{key} lost in {where}"


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def edited(folder: Path, _: Path, drawn: random.Random) -> str:
    """A number of the manifest is another one, or something else."""
    manifest = json.loads((folder / "manifest.json").read_text())
    places: list[tuple[Any, ...]] = [(key,) for key in ("step", "epoch", "position", "seed", "id")]
    for index, group in enumerate(manifest["optimizer"]["groups"]):
        places += [("optimizer", "groups", index, "options", key) for key in group["options"]]
    places += [("scheduler", key) for key in manifest["scheduler"]]
    *path, last = drawn.choice(places)
    values = [0, 1, 2**61, 1e9, "x", None, [], [0.5, 0.5], {}, -1, 0.25, True]
    while True:
        holder = json.loads((folder / "manifest.json").read_text())
        inner = holder
        for key in path:
            inner = inner[key]
        value = drawn.choice(values)
        if json.dumps(inner[last]) != json.dumps(value):
            inner[last] = value
            (folder / "manifest.json").write_text(json.dumps(holder))
            return f"{'.'.join(map(str, (*path, last)))} set to {value!r}"


def added(folder: Path, _: Path, drawn: random.Random) -> str:
    """The scheduler gets an entry, which would take a method's place."""
    name = drawn.choice(["get_lr", "step", "optimizer", "state_dict"])
    _edit(folder, lambda manifest: manifest["scheduler"].update({name: 1.0}))
    return f"scheduler.{name} added"


def flipped_manifest(folder: Path, _: Path, drawn: random.Random) -> str:
    """One bit of the manifest, where that changes what it says."""
    path = folder / "manifest.json"
    before = path.read_bytes()
    while True:
        path.write_bytes(before)
        done = _flip(path, drawn.randrange(len(before)), drawn.randrange(8))
        try:
            same = json.loads(path.read_bytes()) == json.loads(before)
        except ValueError:
            same = False
        if not same:
            return done


DAMAGES: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (
        flipped_tensor,
        flipped_header,
        zeroed,
        cut,
        longer,
        missing,
        other_step,
        swapped,
        lost_tensor,
        edited,
        added,
        flipped_manifest,
    )
}
