"""PipeDream's and DAPPLE's graph.txt."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.errors import FileFormatError
from anabranch.files import load_profile, save_profile
from anabranch.files.pipedream import is_foreign, read_profile
from anabranch.graph.opgraph import BATCH, Op, Parameter, Value
from anabranch.profile.profile import OpCost, Profile
from tests.shared_profiles import SHARED, needs_shared

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def node(key: str, what: str, forward: object = 0, backward: object = 0, out: object = 0,
         parameters: object = 0) -> str:  # fmt: skip
    """One line about a node."""
    return (
        f"{key} -- {what} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={out}, parameter_size={parameters}"
    )


IMAGE = 3 * 224 * 224 * 4

# Input -> conv -> relu -> join, and conv -> join: four images.
LINES = [
    node("node10", "Add(2, 2)", 1.0, 2.0, 800),
    node("node1", "Input", 635.9, 0.0, f"{4 * IMAGE}.000"),
    node("node2", "Conv2d(3, 64, kernel_size=(3, 3))", 2.0, 4.0, 1600, 7168),
    node("node3", "ReLU(inplace)", 0.5, "0.250", 1600),
    "\tnode1 -- node2",
    "  node2 -- node3",
    " \tnode3 -- node10",
    "",
    "\tnode2 -- node10",
]


def write(folder: Path, lines: list[str], name: str = "graph.txt") -> Path:
    """A file of these lines."""
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def refusal(folder: Path, lines: list[str]) -> str:
    """What is said about a file that nobody should accept, after its name."""
    path = write(folder, lines)
    with pytest.raises(FileFormatError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path)).lstrip(": ")


def test_by_eye(tmp_path: Path) -> None:
    """All three kinds of edge lines; Input is the batch; what ReLU overwrites is kept once."""
    (tmp_path / "vgg").mkdir()
    found = read_profile(write(tmp_path / "vgg", LINES))
    assert found.graph.ops == (
        Op("Conv2d", ("Conv2d",), "Conv2d"),
        Op("ReLU", (), "ReLU"),
        Op("Add", (), "Add"),
    )
    assert found.graph.values == (
        Value(BATCH, (0,), IMAGE, grad=False, name="Input"),
        Value(0, (1, 2), 400),
        Value(1, (2,), 400),
    )
    assert found.graph.parameters == (Parameter("Conv2d", 7168),)
    assert found.graph.name == "vgg"
    assert found.samples == (4,)
    assert found.costs == (
        OpCost((0.002,), (0.004,), 400),
        OpCost((0.0005,), (0.00025,), 0),
        OpCost((0.001,), (0.002,), 200),
    )
    assert (found.source, found.proportional) == ("imported", True)
    assert found.origin == (
        "imported, a GPU that PipeDream's format does not name, at 4 samples; "
        "taken as proportional to samples"
    )


def test_the_order_of_the_lines_does_not_matter(tmp_path: Path) -> None:
    """PipeDream writes nodes in the order of a dictionary."""
    assert read_profile(write(tmp_path, LINES[::-1])) == read_profile(write(tmp_path, LINES))


def test_windows_line_ends_and_stage_ids(tmp_path: Path) -> None:
    """The optimizer of PipeDream appends the stage of each node; that is a plan."""
    marked = [line + " -- stage_id=1" if line.startswith("node") else line for line in LINES]
    path = write(tmp_path, marked)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_profile(path) == read_profile(write(tmp_path, LINES))


def test_ids_count_as_numbers(tmp_path: Path) -> None:
    """Where the edges leave a choice, node2 comes before node10."""
    lines = [node(key, key, 1, 1) for key in ("node10", "node2", "node1", "node11")]
    edges = ["node1 -- node10", "node1 -- node2", "node10 -- node11", "node2 -- node11"]
    found = read_profile(write(tmp_path, lines + ["\t" + edge for edge in edges]))
    assert [op.name for op in found.graph.ops] == ["node1", "node2", "node10", "node11"]


def test_several_outputs_are_added_up(tmp_path: Path) -> None:
    """The file does not say which consumer reads which, so every edge has them all."""
    lines = [
        node("a", "LSTM(2, 2)", 1, 1, "[6144.0; 128.0; 128]", 8),
        node("b", "__getitem__(0)", 0, 0, 6144),
        "\ta -- b",
    ]
    found = read_profile(write(tmp_path, lines), samples=2)
    assert found.graph.values == (Value(0, (1,), 3200),)
    assert [cost.kept_bytes for cost in found.costs] == [3200, 0]


def test_no_gradient_where_nothing_before_is_trained(tmp_path: Path) -> None:
    """A mask made from the batch needs none; what a parameter had a part in does."""
    lines = [
        node("ids", "input_ids", 0.01, 0, 8),
        node("mask", "attention_mask", 0.01, 0, 64),
        node("embed", "embeddings", 0.06, 0, 16, 1000),
        node("layer", "layer_0", 2.7, 4.5, 16, 500),
        *("\tids -- mask", "\tids -- embed", "\tembed -- layer", "\tmask -- layer"),
    ]
    found = read_profile(write(tmp_path, lines))
    grads = {found.graph.ops[v.producer].name: v.grad for v in found.graph.values[1:]}
    assert grads == {"embeddings": True, "attention_mask": False}
    assert found.graph.values[0] == Value(BATCH, (0, 1), 8, grad=False, name="input_ids")


def test_bytes_per_sample_round_up(tmp_path: Path) -> None:
    """What is there does not vanish: 4 bytes for 256 samples are one byte for one."""
    lines = [node("a", "A", 1, 1, 4, 1), node("b", "B", 1, 1), "\ta -- b"]
    found = read_profile(write(tmp_path, lines), samples=256)
    assert found.graph.values == (Value(0, (1,), 1),)
    assert found.costs[0].kept_bytes == 1


@pytest.mark.parametrize(
    ("name", "inputs", "samples", "said"),
    [
        ("graph.txt", [node("i", "Input", 1, 0, 8 * IMAGE)], 8, ""),
        ("graph.txt", [node("i", "Input", 1, 0, 5 * 3 * 299 * 299 * 4)], 5, ""),
        ("graph.txt", [node("i", "Input0")], 3, "a sample is a token"),
        ("graph.txt", [node("i", "Input", 1, 0, 12345)], 3, "a sample is a token"),
        ("gnmt-pbs-64-simplified.txt", [node("i", "Input", 1, 0, 8 * IMAGE)], 64, ""),
        ("pbs-006.txt", [node("i", "Input0")], 6, ""),
    ],
)
def test_mini_batch(tmp_path: Path, name: str, inputs: list[str], samples: int, said: str) -> None:
    """The file name first, then images, then the tokens of an embedding."""
    rest = [
        node("e", "Embedding(32320, 1024, padding_idx=0)", 1, 1, 3 * 4096, 100),
        *("\ti -- e", "\te -- f"),
        node("f", "Linear", 1, 1),
    ]
    found = read_profile(write(tmp_path, inputs + rest, name))
    assert found.samples == (samples,)
    assert said in found.device
    assert read_profile(write(tmp_path, inputs + rest, name), samples=7).samples == (7,)


def test_mini_batch_that_nothing_tells(tmp_path: Path) -> None:
    """It is one sample then, and every output that rests on the profile says so."""
    found = read_profile(write(tmp_path, [node("a", "A", 1, 1, 64, 4)]))
    assert found.samples == (1,)
    assert "a sample is the whole mini-batch" in found.origin


BROKEN: list[tuple[int, str, str]] = [
    # line (from 0), what stands there, what the refusal says
    (2, node("node2", "Conv2d", "nan"), 'line 3: forward_compute_time is "nan"; it should be a'),
    (2, node("node2", "Conv2d", 1, "inf"), 'line 3: backward_compute_time is "inf"'),
    (2, node("node2", "Conv2d", -1.5), 'line 3: forward_compute_time is "-1.5"'),
    (2, node("node2", "Conv2d", "1e15"), 'line 3: forward_compute_time is "1e15"'),
    (2, node("node2", "Conv2d", "1_0"), 'line 3: forward_compute_time is "1_0"'),
    (2, node("node2", "Conv2d", ""), 'line 3: forward_compute_time is ""'),
    (2, node("node2", "Conv2d", "[1; 2]"), 'line 3: forward_compute_time is "[1; 2]"'),
    (2, node("node2", "Conv2d", 1, 1, "[4; -8]"), 'line 3: activation_size is "-8"'),
    (2, node("node2", "Conv2d", 1, 1, "[]"), 'line 3: activation_size is ""'),
    (2, node("node2", "Conv2d", 1, 1, 1, "9" * 400), "line 3: parameter_size is"),
    (2, node("node2", "Conv2d", 1, 1, 2**61), "line 3: activation_size is"),
    (2, node("node2", "Conv2d") + ", colour=3", 'line 3 has "colour=3"; the columns are forward_'),
    (2, node("node2", "Conv2d") + ",", 'line 3 has ""; the columns are'),
    (2, node("node2", "Conv2d") + ", parameter_size=3", "line 3 has column parameter_size twice"),
    (2, node("node2", "Conv2d").rpartition(",")[0], "line 3 lacks column parameter_size"),
    (2, "node2 -- Conv2d", 'line 3 is "node2 -- Conv2d"; a node is written as'),
    (2, node("", "Conv2d"), "line 3 is"),
    (2, "hello", 'line 3 is "hello"; a node is written as'),
    (2, node("node2", "Conv2d") + " -- stage_id=x", 'line 3 has "stage_id=x"'),
    (4, "\tnode1", 'line 5 is "node1"; an indented line is an edge such as node1 -- node2'),
    (4, "\tnode1 -- node2 -- node3", "line 5 is"),
    (4, " " + node("node2", "Conv2d"), "line 5 is"),
    (4, "\tnode1 -- node7", "line 5 is an edge node1 -> node7, but there is no node node7"),
    (4, "\tnode7 -- node2", "line 5 is an edge node7 -> node2, but there is no node node7"),
    (7, node("node2", "Linear"), "line 8 describes node node2, and so does line 3"),
    (7, "\tnode2 -- node2", "the edge in line 8 is part of a cycle of 1: node2 -> node2"),
    (7, "\tnode3 -- node2", "is part of a cycle of 2: node2 -> node3 -> node2"),
    (7, node("node8", "Dropout", 1, 1), "line 8: node node8 (Dropout) is connected to nothing"),
]


@pytest.mark.parametrize(("line", "text", "message"), BROKEN)
def test_broken_line(tmp_path: Path, line: int, text: str, message: str) -> None:
    """One wrong line in a good file: the message names file, line and value."""
    assert message in refusal(tmp_path, [*LINES[:line], text, *LINES[line + 1 :]])


def test_a_long_cycle_is_cut_short(tmp_path: Path) -> None:
    """Its length is said, its ends are shown."""
    lines = [node(f"n{i}", "A", 1, 1) for i in range(20)]
    lines += [f"\tn{i} -- n{(i + 1) % 20}" for i in range(20)]
    message = refusal(tmp_path, lines)
    assert "a cycle of 20: n" in message
    assert message.count("->") == 8


def test_falls_apart(tmp_path: Path) -> None:
    """Two models in one file, or two that share only the batch."""
    pair = [node("a", "A", 1, 1), node("b", "B", 1, 1), "\ta -- b"]
    other = [node("c", "C", 1, 1), node("d", "D", 1, 1), "\tc -- d"]
    message = "falls apart: nothing but the batch connects a, b with c, d"
    assert message in refusal(tmp_path, pair + other)
    shared = [node("i", "Input"), "\ti -- a", "\ti -- c"]
    assert message in refusal(tmp_path, pair + other + shared)


def test_nothing_to_run(tmp_path: Path) -> None:
    """Edges alone, or inputs alone."""
    assert "edges, but no line about a node" in refusal(tmp_path, ["\ta -- b"])
    assert "no operators, only 1 inputs" in refusal(tmp_path, [node("i", "Input", 1)])


# nodes, edges, mini-batch, forward ms without Input, backward ms, parameters in MB
TABLE: dict[str, tuple[int, int, int, float, float, float]] = {
    "pipedream/alexnet/graph.txt": (23, 23, 256, 44.8, 40.5, 244.4),
    "pipedream/gnmt/graph.txt": (48, 58, 1536, 33.5, 55.9, 775.1),
    "pipedream/nasnetalarge/graph.txt": (1251, 1468, 16, 409.1, 249.2, 369.0),
    "pipedream/resnet101/graph.txt": (347, 380, 64, 197.3, 213.8, 178.2),
    "pipedream/resnet18/graph.txt": (71, 79, 256, 107.4, 152.3, 46.8),
    "pipedream/resnet50/graph.txt": (177, 193, 128, 182.5, 260.9, 102.2),
    "pipedream/resnext50/graph.txt": (177, 193, 128, 221.8, 369.0, 100.1),
    "pipedream/squeezenet1_0/graph.txt": (68, 76, 256, 113.2, 172.1, 5.0),
    "pipedream/vgg16/graph.txt": (41, 41, 128, 233.9, 438.6, 553.4),
    "dapple/amoeba-6-pbs-8-simplified.txt": (14, 23, 8, 60.0, 152.0, 703.4),
    "dapple/amoeba-6-pbs-8-complicated.txt": (20, 28, 8, 60.0, 152.0, 703.4),
    "dapple/amoeba-18-pbs-8.txt": (26, 47, 8, 207.7, 510.1, 1914.5),
    "dapple/bert-24-pbs-6.txt": (29, 52, 6, 193.7, 321.6, 1340.6),
    "dapple/bert-48-pbs-2.txt": (53, 100, 2, 129.2, 214.6, 2549.8),
    "dapple/gnmt-32-pbs-64-simplified.txt": (67, 124, 64, 160.9, 284.7, 1834.6),
    "dapple/vgg-19-pbs-32.txt": (26, 25, 32, 48.0, 96.2, 548.1),
    "dapple/vgg16.txt": (41, 41, 128, 233.9, 438.6, 553.4),
    "dapple/xlnet-24-pbs-1.txt": (31, 103, 1, 82.1, 119.0, 1379.0),
}


def totals(found: Profile) -> tuple[int, int, int, float, float, float]:
    """The figures of the table; a value of the batch was a node, its consumers were edges."""
    batch = [value for value in found.graph.values if value.producer == BATCH]
    return (
        len(found.graph) + len({value.name for value in batch}),
        len(found.graph.edges) + sum(len(value.consumers) for value in batch),
        found.samples[0],
        sum(cost.forward_s[0] for cost in found.costs) * 1e3,
        sum(cost.backward_s[0] for cost in found.costs) * 1e3,
        sum(found.graph.parameter_bytes.values()) / 1e6,
    )


@needs_shared
@pytest.mark.parametrize("name", TABLE)
def test_published_profiles(name: str) -> None:
    """Counts, times and parameters that were added up apart from this reader."""
    assert totals(read_profile(SHARED / name)) == pytest.approx(TABLE[name], abs=0.06)


@same_folder
@given(text=st.text(max_size=300))
def test_any_text(tmp_path: Path, text: str) -> None:
    """Nothing but a profile or a refusal."""
    path = tmp_path / "f"
    path.write_bytes(text.encode(errors="replace"))
    with contextlib.suppress(FileFormatError):
        read_profile(path)


COLUMNS = ["forward_compute_time=1", "backward_compute_time=2.5e3", "activation_size=[1;2]"]
COLUMNS += ["activation_size=64", "parameter_size=9", "parameter_size=nan", "stage_id=3"]
OTHERS = ["node1", "node2", "node3", "--", "Input", "Conv2d(3)", "Embedding(5,4)", "-1", "1e999"]
WORDS = st.sampled_from([*COLUMNS, *OTHERS, *"=,[];²\t\n\r\x0b\x00\u2028"])


@same_folder
@given(words=st.lists(WORDS, max_size=40), gap=st.sampled_from(["", " ", " -- ", ", "]))
def test_any_words_of_the_format(tmp_path: Path, words: list[str], gap: str) -> None:
    """Texts that look like PipeDream's, most of them broken."""
    path = tmp_path / "f"
    path.write_bytes(("node1 -- " + gap.join(words)).encode())
    with contextlib.suppress(FileFormatError):
        read_profile(path)


@same_folder
@given(data=st.data())
def test_any_line_replaced_by_anything(tmp_path: Path, data: st.DataObject) -> None:
    """A good file with one line, or one character, changed."""
    lines = list(LINES)
    i = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[i])))
    lines[i] = lines[i][:at] + data.draw(st.text(max_size=4)) + lines[i][at + 1 :]
    path = tmp_path / "f"
    path.write_bytes("\n".join(lines).encode(errors="replace"))
    with contextlib.suppress(FileFormatError):
        save_profile(read_profile(path), tmp_path / "ours.json")


@needs_shared
def test_published_plans_are_no_profiles() -> None:
    """All seven of GraphPipe's."""
    plans = sorted((SHARED / "graphpipe-plans").glob("*.txt"))
    assert len(plans) == 7
    for path in plans:
        with pytest.raises(FileFormatError, match="is a plan of GraphPipe's runtime"):
            read_profile(path)


def test_no_file(tmp_path: Path) -> None:
    """Missing, or a folder."""
    with pytest.raises(FileFormatError, match="does not exist"):
        read_profile(tmp_path / "nothing.txt")
    with pytest.raises(FileFormatError, match="is a folder"):
        is_foreign(tmp_path)


def test_samples_are_a_count(tmp_path: Path) -> None:
    """A wrong argument is no fault of the file."""
    for samples in (0, -1, 2**41):
        with pytest.raises(ValueError, match=f"samples is {samples}"):
            read_profile(tmp_path / "nothing.txt", samples)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n\t\n", "is empty"),
        ("hello\nworld", 'is no profile: it starts with "hello"'),
        ("1.5 2.5\n", 'is no profile: it starts with "1.5 2.5"'),
        ("[1, 2]", "is no profile: it starts with"),
        ("3 0 0 1\n2 64 128 1 1 64 64 1 1\n", "is a plan of GraphPipe's runtime (3 operators"),
        ("3 0 0 1", "is a plan of GraphPipe's runtime (3 operators"),
        ("3 0 0 1 1", "is no profile"),
        ("99999999999999999999 1", "is no profile"),
        (b"\xff\xfe\x00", "is no text in UTF-8"),
    ],
)
def test_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    """The message says what the file is, and what can be read."""
    path = tmp_path / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileFormatError) as caught:
        read_profile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("samples", [None, 3])
def test_read_and_kept_in_our_own_format(tmp_path: Path, samples: int | None) -> None:
    """What is read can be saved, loads as the same, and is then no longer foreign."""
    path = write(tmp_path, LINES, "of any name")
    found = read_profile(path, samples)
    assert is_foreign(path)
    save_profile(found, tmp_path / "ours.json")
    assert load_profile(tmp_path / "ours.json") == found
    assert not is_foreign(tmp_path / "ours.json")
