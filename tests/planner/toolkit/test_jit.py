"""Where machine code is kept."""

from __future__ import annotations

from anabranch.planner.toolkit import jit


def test_machine_code_of_a_module_is_kept_or_not(tmp_path, monkeypatch):
    """By its files, somewhere in the folder; without a folder nothing is."""
    monkeypatch.setattr(jit, "code_folder", lambda: tmp_path)
    (tmp_path / "anabranch.planner.auto.stage_clock.step_s.0.o").touch()
    assert jit.is_kept("stage_clock")
    assert not jit.is_kept("partitioner")
    monkeypatch.setattr(jit, "code_folder", lambda: None)
    assert not jit.is_kept("stage_clock")
