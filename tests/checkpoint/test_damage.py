"""Damaged checkpoints: refused before anything is loaded, with the file."""

import json
import re
from pathlib import Path

import pytest

from anabranch.checkpoint import Checkpoint
from anabranch.errors import FileFormatError
from anabranch.runtime.pipeline import Pipeline
from benchmarks.faults.damage import DAMAGES, damaged
from tests.checkpoint.test_reading import amsgrad, cosine, data, run, steps
from tests.runtime.small import built, plan, with_options

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the checkpoints of two steps, each of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    model = built("TwoBranch")
    workload = with_options(model, optimizer=amsgrad, scheduler=cosine, data=data)

    def work(make) -> None:
        pipeline: Pipeline = make()
        for step in (1, 2):
            steps(pipeline, 1)
            pipeline.save(folder / f"step-{step}")

    run(model, workload, plan(model, 2), work)
    return folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_damaged_is_refused_with_the_file(kind: str, two_steps: Path, tmp_path: Path):
    """Before anything is loaded: it would train on, from numbers that nobody has learned."""
    Checkpoint(two_steps / "step-2").verify()
    for seed in range(6):
        folder = tmp_path / str(seed)
        done = damaged(two_steps / "step-2", two_steps / "step-1", folder, kind, seed)
        with pytest.raises(FileFormatError, match=re.escape(f"{folder}/")):
            read(folder, done)


def read(folder: Path, done: str) -> None:
    Checkpoint(folder).verify()
    pytest.fail(f"not seen: {done}")


def test_the_newest_of_a_run_is_read(two_steps: Path):
    """The folder of a run stands for its last checkpoint."""
    assert Checkpoint(two_steps).manifest.step == 2


def test_files_of_two_checkpoints_are_told_apart(two_steps: Path, tmp_path: Path):
    """With both steps: whoever copied them finds out which."""
    folder = tmp_path / "mixed"
    for seed in range(20):
        if "rank" in damaged(
            two_steps / "step-2", two_steps / "step-1", folder / str(seed), "other_step", seed
        ):
            break
    with pytest.raises(FileFormatError, match=r"rank-\d.* is of another checkpoint .* 1, not 2"):
        Checkpoint(folder / str(seed))


def test_a_rank_reads_the_files_of_all(two_steps: Path, tmp_path: Path):
    """Each compares its share with the checksums, together all files; so a rank's own tensors are
    not the only ones that are known to be whole.
    """
    folder = tmp_path / "saved"
    damaged(two_steps / "step-2", two_steps / "step-1", folder, "flipped_tensor", 1)
    refused = 0
    for share in range(2):
        try:
            Checkpoint(folder).verify(share, 2)
        except FileFormatError:
            refused += 1
    assert refused == 1


def test_a_manifest_keeps_its_own_checksum(two_steps: Path, tmp_path: Path):
    """An old manifest without one is told by the missing key."""
    folder = tmp_path / "saved"
    damaged(two_steps / "step-2", two_steps / "step-1", folder, "swapped", 1)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(FileFormatError, match="key checksum is missing"):
        Checkpoint(folder)
