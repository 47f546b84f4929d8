"""Files that are read while a model is captured."""

from __future__ import annotations

from pathlib import Path

from anabranch.capture_cache.file_watch import files_read


def test_data_are_seen_and_code_is_not(tmp_path: Path) -> None:
    """Code is hashed; what else is read is in no key. Before and after nothing is watched."""
    data, code, later = (tmp_path / name for name in ("a.txt", "b.py", "c.txt"))
    for path in (data, code, later):
        path.write_text("1")
    with files_read() as found:
        data.read_text()
        code.read_text()
    later.read_text()
    assert found == {str(data)}
