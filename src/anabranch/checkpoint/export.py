"""Export of the model of a checkpoint, without training state, for other programs.

One safetensors file has the tensors of a ``state_dict``, each once: a tied weight under its first
name, and no buffer that is not persistent. Hugging Face's ``save_pretrained`` writes the same;
``from_pretrained``, and ``safetensors.torch.load_model``, tie the other names again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from anabranch.checkpoint.manifest import Pretrained
from anabranch.checkpoint.reading import Checkpoint
from anabranch.checkpoint.writing import write_tensors
from anabranch.errors import TrainingError
from anabranch.files.jsonfile import FilePath
from anabranch.graph.slices import whole_name

WEIGHTS = "model.safetensors"
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        path: the file or folder that was written.
        tensors: number of tensors.
        bytes: bytes of all tensors.
        prefix: prefix of their names in the module.
        left_out: number of tensors of the module whose names have another prefix.
        architecture: class of Hugging Face for the folder or file; or empty.
        checkpoint: the checkpoint that was read; of a folder with several the newest.
    """

    path: Path
    tensors: int
    bytes: int
    prefix: str
    left_out: int
    architecture: str
    checkpoint: Path


def export(
    checkpoint: FilePath, output: FilePath, *, prefix: str | None = None, trained: bool = False
) -> Exported:
    """Write the model of a checkpoint.

    Args:
        checkpoint: its folder, or the folder of a run with several, for the newest.
        output: a new file ``NAME.safetensors``; or a new folder for ``model.safetensors`` and, for
            a model of Hugging Face, ``config.json``, which ``from_pretrained`` reads.
        prefix: export only tensors whose names begin with it, such as ``model.``, and strip it. By
            default the prefix of the only model of Hugging Face in the module, if it is all of it.
        trained: export only trained parameters, such as adapters. A folder then has no
            ``config.json``; with one LoRA adapter of peft ``PeftModel.from_pretrained`` reads it.

    Raises:
        FileFormatError: if the checkpoint is incomplete or damaged.
        TrainingError: if the output exists or cannot be written, or no name begins with the prefix.
    """
    saved, path = Checkpoint(checkpoint), require_new(output)
    parts = {part.prefix: part for part in saved.manifest.pretrained}
    names = saved.names()
    if trained:
        groups = saved.optimizer.groups if saved.optimizer is not None else ()
        updated = {whole_name(name) for group in groups for name in group.parameters}
        names = {first: several for first, several in names.items() if first in updated}
    chosen = _only_prefix(parts, names) if prefix is None else prefix
    files = _exported_names(names, chosen)
    if not files:
        held = f"; it holds {', '.join(map(repr, parts))}" if parts else ""
        raise TrainingError(f"no tensor of {saved.folder} has a name with {chosen!r} first{held}")
    saved.verify()
    tensors = {name: saved.tensor(f"model/{first}") for first, name in files.items()}
    pretrained = parts.get(chosen)
    # Adapters are no part of a model that ``from_pretrained`` could make.
    part = None if trained or saved.frozen or (pretrained and pretrained.adapter) else pretrained
    weights, adapter = WEIGHTS, pretrained.adapter_config if pretrained and trained else None
    if pretrained and adapter and path.suffix != ".safetensors":
        weights = _ADAPTER
        tensors = {_name_in_peft(name, pretrained.adapter): t for name, t in tensors.items()}
    with written_whole(path, SafetensorError) as partial:
        if path.suffix == ".safetensors":
            write_tensors(tensors, partial, {"format": "pt"})
        else:
            partial.mkdir()
            write_tensors(tensors, partial / weights, {"format": "pt"})
            if adapter:
                (partial / "adapter_config.json").write_text(adapter)
            if part is not None:
                (partial / "config.json").write_text(part.config)
            if part is not None and part.generation_config is not None:
                (partial / "generation_config.json").write_text(part.generation_config)
    return Exported(
        path,
        len(tensors),
        sum(tensor.nbytes for tensor in tensors.values()),
        chosen,
        len(names) - len(files),
        part.architecture if part is not None else "",
        saved.folder,
    )


def require_new(output: FilePath) -> Path:
    """Return the output path; raises TrainingError if it exists."""
    if os.path.lexists(output):
        raise TrainingError(f"{output} exists, and an export never replaces anything; name another")
    return Path(output)


@contextmanager
def written_whole(path: Path, kind: type[BaseException]) -> Iterator[Path]:
    """Yield a path in a temporary folder, which is renamed to ``path`` once all is written.

    Raises:
        TrainingError: for an OSError inside, or an error of ``kind``.
    """
    folder = path.with_name(f".{path.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield (partial := folder / path.name)
        partial.rename(path)
    except (OSError, kind) as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name_in_peft(name: str, adapter: str) -> str:
    """Return the name in peft's own files of a trained tensor of a model."""
    plain = name.replace(f".modules_to_save.{adapter}.", ".")
    plain = plain.replace(f".lora_magnitude_vector.{adapter}.weight", ".lora_magnitude_vector")
    return f"base_model.model.{plain}".replace(f".{adapter}.", ".").removesuffix(f".{adapter}")


def _exported_names(names: Mapping[str, Sequence[str]], prefix: str) -> dict[str, str]:
    """Return first name -> name in the file, for tensors that have a name with the prefix."""
    first_names = {
        first: next((name for name in several if name.startswith(prefix)), None)
        for first, several in names.items()
    }
    return {first: n.removeprefix(prefix) for first, n in first_names.items() if n is not None}


def _only_prefix(parts: Mapping[str, Pretrained], names: Mapping[str, Sequence[str]]) -> str:
    """Return the prefix of the only model of Hugging Face if nothing else is in the module."""
    for prefix in parts:
        if len(parts) == 1 and len(_exported_names(names, prefix)) == len(names):
            return prefix
    return ""
