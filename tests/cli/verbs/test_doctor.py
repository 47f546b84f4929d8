"""The verb doctor: what is to know of a model, as text and as a document."""

import json

from anabranch.cli.verbs import doctor
from anabranch.errors import CaptureError
from tests.cli.examples import TOWERS


def test_doctor_examines_a_model(document):
    """The contract's fields; memory per device is that of the plan."""
    found = document("doctor", TOWERS, "--cluster", "summit:1x2", "--batch-size", "8")
    assert found["capturable"]
    assert found["loss"] == "mean"
    assert found["width"] > 1
    assert found["plan"]["schema"].startswith("anabranch.plan/")
    assert [entry["device"] for entry in found["device_bytes"]] == [0, 1]
    assert set(found["versions"]) >= {"python", "torch", "anabranch"}


def test_the_cluster_that_nobody_named_is_an_example(run):
    """Beside it stands how to name one's own."""
    code, out, _ = run("doctor", TOWERS, "--batch-size", "8")
    assert code == 0
    assert "for summit:1x4 with times from the data sheet of v100 (--cluster names your dev" in out


def test_machine_code_is_made_beside_the_capture(run, monkeypatch):
    """It was made after it: half of the first examination on a machine."""

    def refuse(_):
        raise CaptureError("not yet captured")

    monkeypatch.setattr(doctor, "begin_compiling", refuse)
    assert "not yet captured" in run("doctor", "tests.cli.models:not_there")[2]


def test_the_first_plan_is_for_batches_of_the_data(document):
    """As ``train`` and ``verify`` take them, where nobody says a size."""
    found = document("doctor", "tests.cli.models:loaded", "--cluster", "summit:1x2")
    assert found["plan"]["batch_size"] == 8


def test_the_first_plan_is_in_the_precision_of_training(document):
    """It was one for fp32, whatever the model is trained in."""
    arguments = ("doctor", TOWERS, "--cluster", "summit:1x2", "--batch-size", "8")
    assert document(*arguments, "--precision", "bf16")["plan"]["precision"] == "bf16"


def test_a_model_that_cannot_be_captured_is_no_success(run):
    """The document is whole, with the line that stops it."""
    code, out, _ = run("doctor", "tests.cli.models:branching", "--json")
    found = json.loads(out)
    assert code == 1
    assert not found["capturable"]
    assert "if left.sum() > 0:" in found["error"]


def test_steps_of_a_data_sheet_are_not_those_of_this_machine(run):
    """It named local:2 and gave milliseconds of a V100, without a word that none was timed here."""
    out = run("doctor", TOWERS, "--batch-size", "8", "--cluster", "local:2")[1]
    assert "this machine was not timed" in " ".join(out.split())
    assert "--cluster names your devices" not in " ".join(out.split())
    assert f"anabranch plan {TOWERS} --cluster local:2 --batch-size 8" in " ".join(out.split())
