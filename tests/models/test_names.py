"""How a name becomes a workload."""

import re
import sys
import textwrap

import pytest
import torch

from anabranch.errors import DataError, WorkloadError
from anabranch.models.names import resolve
from anabranch.workload import Workload

MODULE = """
    import torch
    from torch import nn
    from anabranch import Workload
    from anabranch.errors import DataError

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.left = nn.Linear(8, width)
            self.right = nn.Linear(8, width)
            self.right.weight = self.left.weight
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            return (self.scale * (self.left(x) + self.right(x))).mean()

    def workload(width="4"):
        generator = torch.Generator().manual_seed(0)
        return Workload(Net(int(width)), {"x": torch.randn(2, 8, generator=generator)})

    def named(preset, **options):
        return Workload(Net(4), torch.ones(2, 8), name=f"{preset} {sorted(options)}")

    def weighed():
        module = Net(2)
        module.norm = module.left.weight.norm().item()
        return Workload(module, torch.ones(2, 8))

    def demanding(path):
        return None

    def returns_the_module():
        return Net(4)

    def fails():
        raise RuntimeError("my own mistake")  # theirs:fails

    def misuses():
        return sizes()

    def sizes():
        return nn.Linear("many", 2)  # theirs:misuses

    def takes_the_class():
        return Workload(Net, torch.ones(2, 8))  # theirs:takes_the_class

    def wrong_value():
        raise ValueError("3 < 4")  # theirs:wrong_value

    def without_data():
        raise DataError("no such table")

    class Factory:
        @staticmethod
        def make():
            return Workload(Net(2), torch.ones(2, 8))

    SIZE = 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """The user's module lies in the current directory."""
    (tmp_path / "theirs.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import sys\nimport a_package_that_is_missing\n")
    (tmp_path / "garbled.py").write_text("import sys\n\ndef workload(:\n")
    (tmp_path / "early.py").write_text(
        "import math\n\ndef look():\n    return math.nothing\n\nlook()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("theirs", None)


def test_a_built_in_name():
    """With its preset and options."""
    workload = resolve("two-branch", preset="small", options={"branches": "3"})
    assert isinstance(workload, Workload)
    assert len(workload.example["inputs"]) == 3


def test_a_function_in_the_current_directory():
    """It is named after what the user typed, unless it has a name of its own."""
    workload = resolve("theirs:workload")
    assert workload.name == "theirs:workload"
    assert workload.module.left.out_features == 4


def test_options_are_keyword_arguments():
    """As text: the function knows what it wants to make of it."""
    assert resolve("theirs:workload", options={"width": "6"}).module.left.out_features == 6
    assert resolve("theirs:named", preset="small", options={"a": "1"}).name == "small ['a']"


def test_a_function_may_lie_deeper():
    """An attribute of an attribute."""
    assert resolve("theirs:Factory.make").module.left.out_features == 2


def test_meta_takes_the_memory_away():
    """Parameters, buffers and example; tied parameters stay one. Later modules are real."""
    workload = resolve("theirs:workload", meta=True)
    assert all(tensor.is_meta for tensor in workload.module.state_dict().values())
    assert workload.example["x"].is_meta
    assert workload.module.left.weight is workload.module.right.weight
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_what_reads_its_parameters_has_them_until_then():
    """A function that asks for their values could not be planned for GPUs."""
    workload = resolve("theirs:weighed", meta=True)
    assert workload.module.norm > 0
    assert all(tensor.is_meta for tensor in workload.module.state_dict().values())


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("resnet", {}, "no built-in model resnet; there are mmt, .*package.module:function"),
        ("nowhere:workload", {}, "no module nowhere for nowhere:workload; .*looked for in"),
        ("theirs:nothing", {}, "theirs has no nothing; its functions are workload, named"),
        ("theirs:SIZE", {}, "theirs:SIZE is an int, not a function"),
        ("theirs:Net", {}, "theirs:Net is a class, not a function of yours"),
        ("theirs:returns_the_module", {}, "returned a Net, not an anabranch.Workload; end it with"),
        (
            "theirs:demanding",
            {},
            "missing a required argument: 'path'; its arguments are path",
        ),
        (
            "theirs:workload",
            {"depth": "2"},
            "keyword argument 'depth'; its arguments are width",
        ),
        ("../theirs.py:workload", {}, "there is no module theirs for ../theirs.py:workload"),
        ("theirs-2:workload", {}, "not of the form package.module:function or file.py"),
        ("theirs:", {}, "not of the form"),
    ],
)
def test_what_is_wrong_and_what_to_write_instead(text, options, message):
    """The user sees one line, no traceback."""
    with pytest.raises(ValueError, match=message):
        resolve(text, options=options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("theirs:fails", "theirs:fails raised at theirs.py:LINE, in fails: RuntimeError: my own"),
        # The last line of their own, not the one in torch that raised.
        ("theirs:misuses", "raised at theirs.py:LINE, in sizes: TypeError"),
        ("theirs:takes_the_class", "raised at theirs.py:LINE, in takes_the_class: TypeError: the "),
        ("theirs:wrong_value", "raised at theirs.py:LINE, in wrong_value: ValueError: 3 < 4"),
        ("broken:workload", "importing broken raised at broken.py:2: ModuleNotFoundError: No mod"),
        ("garbled:workload", "importing garbled raised at garbled.py:3: SyntaxError"),
        ("early:workload", "importing early raised at early.py:4, in look: AttributeError: modu"),
    ],
)
def test_a_mistake_in_the_users_own_code_is_named_by_its_line(text, message):
    """File, line and function, and the exception itself is the cause."""
    lines = textwrap.dedent(MODULE).splitlines()
    (line,) = [i for i, code in enumerate(lines, 1) if code.endswith(f"# {text}")] or [0]
    with pytest.raises(WorkloadError, match=re.escape(message.replace("LINE", str(line)))) as found:
        resolve(text)
    assert type(found.value.__cause__).__name__ in message


def test_a_mistake_with_options_shows_them():
    """As the function was called, with texts."""
    with pytest.raises(WorkloadError, match=r"theirs:workload\(width='wide'\) raised at"):
        resolve("theirs:workload", options={"width": "wide"})


def test_a_neighbour_of_ours_is_the_users_own(tmp_path, monkeypatch):
    """Its path begins like that of this package, as that of an extension may."""
    monkeypatch.setattr("anabranch.errors.__file__", str(tmp_path / "the" / "errors.py"))
    with pytest.raises(WorkloadError, match=r"raised at theirs.py:\d+, in fails: RuntimeError"):
        resolve("theirs:fails")


def test_our_own_errors_stay_what_they_are():
    """A function that reads a data set may miss it, which has a message of its own."""
    with pytest.raises(DataError, match="no such table"):
        resolve("theirs:without_data")


def test_a_file_is_a_module_too(tmp_path, monkeypatch):
    """As a shell completes it, from any folder; a typo in the function is answered."""
    text = "from tests.cli.models import towers\n\n\ndef workload():\n    return towers()\n"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "model_in_a_file.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert resolve("below/model_in_a_file.py:workload").module is not None
    with pytest.raises(ValueError, match=r"has no worklod \(is workload meant\?\)"):
        resolve("below/model_in_a_file.py:worklod")
    with pytest.raises(ValueError, match=r"there is no module model_in_no_file .* looked for in /"):
        resolve("model_in_no_file.py:workload")
