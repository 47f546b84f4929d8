"""The verb report with another run, and the first sentence of pages."""

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

from anabranch.plans.plan import ModelSize
from anabranch.record import save_run
from tests.record.test_figures import ORDER, STEPS


def test_another_run_is_laid_over(run, document, tmp_path: Path):
    """Its timelines under the same axis, its loss in the second colour, figures side by side."""
    save_run(STEPS, tmp_path / "one")
    save_run(replace(STEPS, losses=(9.0, 8.0), period_s=8.5), tmp_path / "two")
    file = document("report", "one", "--against", "two", "-o", "both.html")["path"]
    html = unescape(Path(file).read_text(encoding="utf-8"))
    assert "Beside two" in html
    assert "This run has 2.00x the samples per second of two" in html
    for title in ("predicted", "two: predicted"):
        assert f'"title":"{title}"' in html
    loss = html.partition("<h2>Loss</h2>")[2].partition("</section>")[0]
    assert re.findall(r'class="(line[01])"', loss) == ["line1", "line0"]
    save_run(STEPS, tmp_path / "before" / "one")  # which a name alone would not tell apart
    file = document("report", "one", "--against", "before/one", "-o", "both.html")["path"]
    assert "Beside before/one" in Path(file).read_text(encoding="utf-8")
    code, _, _ = run("report", "one")
    assert (code, "Beside" in Path("one/report.html").read_text(encoding="utf-8")) == (0, False)


def test_runs_without_a_flush_too(run, document, tmp_path: Path):
    """And a run of another model is refused."""
    save_run(ORDER, tmp_path / "one")
    save_run(STEPS, tmp_path / "two")
    file = document("report", "one", "--against", "two", "-o", "both.html")["path"]
    assert "Beside two" in Path(file).read_text(encoding="utf-8")
    other = replace(STEPS, plan=replace(STEPS.plan, model="another"))
    save_run(other, tmp_path / "three")
    code, _, err = run("report", "one", "--against", "three", "-o", "none.html")
    assert (code, "three is a run of another" in " ".join(err.split())) == (2, True)


def test_a_run_by_a_profile_file_is_laid_over_one_of_the_model(run, tmp_path: Path):
    """Its plan has the name of the file, so the sizes of both models are compared."""
    by_file = replace(STEPS.plan, model="mymodel.json", model_size=ModelSize(100, 7))
    for name, plan in (
        ("file", by_file),
        ("same", replace(by_file, model="mymodel:workload", model_size=ModelSize(100, 8))),
        ("other", replace(by_file, model="mymodel:workload", model_size=ModelSize(104, 7))),
        ("unknown", replace(by_file, model="mymodel:workload", model_size=None)),
    ):
        save_run(replace(STEPS, plan=plan), tmp_path / name)
    codes = [run("report", "file", "--against", b)[0] for b in ("same", "other", "unknown")]
    assert codes == [0, 2, 2]
    assert run("report", "same", "--against", "file")[0] == 0


def headline(page: Path) -> str:
    (line,) = re.findall(r'<p class="headline">(.*?)</p>', page.read_text(encoding="utf-8"))
    return unescape(line)


def test_a_page_begins_with_step_gain_bound_and_limit(document, run, profile, tmp_path: Path):
    """What plan has found stays in the plan's file, so that simulate need not plan again."""
    options = ("--cluster", "summit:1x2", "--batch-size", "16", "-o", "plan.json")
    made = document("plan", profile, *options)
    predicted = json.loads(Path("plan.json").read_text())["predicted"]
    baselines = made["baselines"]
    assert predicted["data_parallel_s"] == baselines["data-parallel"]["predicted"]["step_s"]
    assert run("simulate", "plan.json", profile, "--report", "page.html")[0] == 0
    said = headline(Path("page.html"))
    gain = predicted["data_parallel_s"] / predicted["step_s"]
    assert said.startswith(f"A step takes {predicted['step_s'] * 1e3:.2f} ms, ")
    assert f"{gain:.2f}x as fast as data parallelism" in said
    assert "as fast as the best chain" in said
    assert f"within {predicted['step_s'] / predicted['bound_s']:.2f}x of the best possible" in said
    assert f"Most of it: {predicted['limit']}." in said
    assert (
        run("simulate", "plan.json", profile, "--schedule", "gpipe", "--report", "g.html")[0] == 0
    )
    assert "as fast as" not in headline(Path("g.html")), "baselines are of the plan as it was made"


def test_the_page_of_a_simulation_without_a_flush_has_staleness(run, profile):
    """Version difference, versions that are read, copies held, as the terminal has them."""
    options = ("--cluster", "summit:1x2", "--batch-size", "16", "-o", "plan.json")
    more = ("--mode", "async", "--policy", "stash", "--optimizer", "sgd-momentum")
    assert run("plan", profile, *options, *more)[0] == 0
    code, _, _ = run(
        "simulate", "plan.json", profile, "--optimizer", "sgd-momentum", "--report", "page.html"
    )
    assert code == 0
    html = Path("page.html").read_text(encoding="utf-8")
    assert headline(Path("page.html")).startswith("A mini-batch takes ")
    assert "forward reads" in html
    assert "versions held" in html


def test_the_page_of_a_run_begins_with_what_was_measured(tmp_path: Path):
    """And with what its plan knows beside the prediction; without one, with that alone."""
    save_run(STEPS, tmp_path / "one")
    took = f"A step took {STEPS.median_step_s * 1e3:.2f} ms"
    predicted = STEPS.plan.figures.step_s
    first = f"{took}, measured. Predicted: {predicted * 1e3:.2f} ms"
    assert headline(tmp_path / "one" / "report.html").startswith(first)
    known = replace(STEPS.plan.figures, data_parallel_s=2 * predicted, limit="stage 0 computes, 9%")
    save_run(replace(STEPS, plan=replace(STEPS.plan, predicted=known)), tmp_path / "two")
    said = headline(tmp_path / "two" / "report.html")
    assert "2.00x as fast as data parallelism" in said
    assert said.endswith("Most of it: stage 0 computes, 9%.")
    save_run(replace(STEPS, plan=replace(STEPS.plan, predicted=None)), tmp_path / "three")
    said = headline(tmp_path / "three" / "report.html")
    assert said == f"{took}; not predicted for this run."
