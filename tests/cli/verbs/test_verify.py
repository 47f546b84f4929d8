"""The verb verify."""

import pytest

from tests.cli.examples import TOWERS


@pytest.mark.dist
def test_verify_is_bitwise(document):
    """The proof that a newcomer asks for first."""
    found = document("verify", TOWERS, "--devices", "2", "--batch-size", "8")
    assert found["bitwise"]
    assert found["max_gradient_error"] == 0
    assert found["loss"] == found["reference_loss"]


@pytest.mark.dist
def test_verify_explains_the_words_of_its_plan(run):
    """As plan and train do."""
    code, out, _ = run("verify", TOWERS, "--devices", "2", "--batch-size", "8")
    assert code == 0
    assert "in flight: micro-batches between forward and backward in a stage" in out


@pytest.mark.parametrize("verb", ["verify", "doctor"])
def test_help_offers_no_profile_file_where_the_model_itself_is_needed(verb, run):
    code, out, _ = run(verb, "--help")
    assert (code, "package.module:function. " in " ".join(out.split())) == (0, True)
    assert "profile file. " not in " ".join(out.split())


@pytest.mark.dist
def test_verify_compares_a_rewritten_model_with_the_one_as_written(document):
    """Slices have the gradients of their parts of the module's parameters, to rounding."""
    sizes = [f"-o{size}" for size in ("branches=2", "layers=1", "top_layers=1", "width=8")]
    shared = ["--devices", "2", "--batch-size", "8", "--rewrite", "join-split"]
    found = document("verify", "candle-uno", *sizes, *shared)
    assert found["max_gradient_error"] < 1e-5
    assert not found["exact"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rewrite", "auto"], "name rewrites, such as join-split"),
        (["--rewrite", "join-split", "--plan", "plan.json"], "plan.json decides what --rewrite"),
        (["--rewrite", "none", "--plan", "plan.json"], "plan.json decides what --rewrite"),
    ],
)
def test_rewrites_that_verify_cannot_have_are_refused(arguments, reason, run):
    """Nothing is chosen here, and a plan has its own."""
    code, _, err = run("verify", TOWERS, *arguments)
    assert code == 2
    assert reason in err


@pytest.mark.parametrize("verb", ["verify", "train"])
def test_a_device_that_is_not_there_is_told_before_anything_runs(verb, run, monkeypatch):
    """And nothing has used CUDA by then, or forked ranks could not."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    code, _, err = run(verb, TOWERS, "--device", "cuda")
    assert code == 1
    assert "there is no CUDA device here; leave the device out to train on CPUs" in err


@pytest.mark.parametrize("verb", ["verify", "train"])
def test_help_says_which_gpu_a_rank_takes(verb, run):
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert "LOCAL_RANK" in out
