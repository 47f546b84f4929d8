"""Weights that another program saved: plain safetensors of a whole model, to start training from.

They are one file, a folder with ``model.safetensors``, or one with several files and the index of
Hugging Face's ``save_pretrained`` (``model.safetensors.index.json``). Each rank reads its part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from anabranch.checkpoint.manifest import type_text
from anabranch.checkpoint.reading import opened, read_tensor
from anabranch.errors import FileFormatError
from anabranch.files.jsonfile import FilePath, parse, read_text

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class PlainWeights:
    """Tensors by the names of a model's ``state_dict``.

    Raises:
        FileFormatError: if there is no such file, or it is damaged.
    """

    def __init__(self, path: FilePath) -> None:
        self.path = Path(path)
        self._files: dict[str, Path] = {}
        for file in self._tensor_files():
            for name in _names(file):
                if name in self._files:
                    raise FileFormatError(f"{name} is in {self._files[name]} and in {file}")
                self._files[name] = file

    def _tensor_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if (self.path / _INDEX).is_file():
            return self._indexed(self.path / _INDEX)
        if (self.path / _ONE).is_file():
            return [self.path / _ONE]
        raise FileFormatError(
            f"{self.path} has no weights to start from: it is neither a safetensors file nor a "
            f"folder with {_ONE} or {_INDEX}"
        )

    def _indexed(self, index: Path) -> list[Path]:
        document = parse(read_text(index), str(index))
        table = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(table, dict) or not all(isinstance(f, str) for f in table.values()):
            raise FileFormatError(f"{index}: weight_map has to say in which file each tensor is")
        for name in table.values():
            if Path(name).name != name:
                raise FileFormatError(f"{index}: {name!r} is no plain file name")
        files = [self.path / name for name in sorted(set(table.values()))]
        listed = {name for file in files for name in _names(file)}
        if lost := sorted(set(table) - listed):
            raise FileFormatError(f"{index} lists {lost[0]}, which is not in {table[lost[0]]}")
        return files

    def match(
        self, names: Mapping[str, Sequence[str]], transient: Collection[str]
    ) -> dict[str, str]:
        """Return first name -> name in the file, for each tensor of a model.

        Names in the file may lack a prefix that all names of the model have, such as ``model.``.

        Args:
            names: first name -> all names of a tensor.
            transient: first names of tensors that no ``state_dict`` has; the file need not either.

        Raises:
            FileFormatError: if the file lacks a tensor, or has one that the model lacks.
        """
        every = {name for several in names.values() for name in several}
        prefix = self._prefix(every)
        keys = {prefix + key: key for key in self._files}
        key_of = {
            first: next((keys[name] for name in several if name in keys), None)
            for first, several in names.items()
        }
        missing = [name for name, key in key_of.items() if key is None and name not in transient]
        unknown = sorted(keys[name] for name in keys.keys() - every)
        if missing or unknown:
            differences = [
                f"{what} {len(some)}, such as {some[0]}"
                for what, some in (("lacks", missing), ("has in addition", unknown))
                if some
            ]
            raise FileFormatError(
                f"{self.path} and the model do not have the same tensors: it "
                f"{' and '.join(differences)}; weights to start from are those of the whole model, "
                "by the names of its state_dict"
            )
        return {name: key for name, key in key_of.items() if key is not None}

    def _prefix(self, names: Set[str]) -> str:
        """Return the prefix that the file's names lack, if the file is of a part of the model."""
        if not self._files or not names.isdisjoint(self._files):
            return ""
        longest = max(self._files, key=len)
        starts = {name.removesuffix(longest) for name in names if name.endswith(f".{longest}")}
        whole = [start for start in starts if all(start + key in names for key in self._files)]
        return whole[0] if len(whole) == 1 else ""

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """Read one tensor and convert it to the type of ``like``.

        Raises:
            FileFormatError: if it is damaged, of another shape, or would be rounded.
        """
        file = self._files[name]
        tensor = read_tensor(file, name)
        fits = torch.promote_types(tensor.dtype, like.dtype) == like.dtype
        if tensor.shape != like.shape or not fits:
            raise FileFormatError(
                f"{file}: tensor {name} is {type_text(tensor.dtype, tensor.shape)}, but the model "
                f"has {type_text(like.dtype, like.shape)} there"
            )
        return tensor.to(like.dtype)


def _names(file: Path) -> list[str]:
    with opened(file) as tensors:
        return list(tensors.keys())
