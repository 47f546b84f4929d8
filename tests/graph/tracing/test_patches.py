"""Checks of the data: those that only raise are left out, those that choose are refused."""

from __future__ import annotations

import gc
import linecache
import multiprocessing
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.module_state import with_attributes
from anabranch.graph.tracing.export import CaptureWarning
from anabranch.graph.tracing.library_rules import library_rules
from anabranch.graph.tracing.patches import tracing_alone
from tests.graph.chain import check_split
from tests.graph.nets import one_stage

LIBRARY = f"{torch.__path__[0]}vision/ops.py"


def asserted(x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"
    return x


def refused(x: Tensor) -> Tensor:
    if x.max() > 100:
        raise ValueError("too large")
    return x


def negated(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError(f"not finite: {x}")
    return x


def several(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all() or (x.min() < -100 and x.max() > 100):
        raise ValueError("not finite, or too far apart")
    return x


def asked(x: Tensor) -> Tensor:
    if x.max().item() > 100 or bool(x.isnan().any()):
        raise ValueError("too large")
    return x


def otherwise(x: Tensor) -> Tensor:
    if (x < 100).all():
        x = x + 1
    else:
        raise ValueError("too large")
    return x


def chosen(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = -x
    return x


class Checked(nn.Module):
    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.check, self.layer = check, nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.check(x)).square().mean()


@pytest.mark.parametrize("check", [asserted, refused, negated, several, asked, otherwise])
def test_a_check_that_only_raises_is_left_out_and_told(check: Callable[[Tensor], Tensor]) -> None:
    """With its file and line; afterwards tensors have their truth again."""
    module = Checked(check)
    with pytest.warns(CaptureWarning, match=r"test_patches.py:\d+ \((if|assert)"):
        captured = capture(module, torch.randn(4, 3))
    assert len(captured.graph) == 1
    assert not torch.tensor(False)


def likely(x: Tensor) -> Tensor:
    return nn.functional.gaussian_nll_loss(x, x.detach() + 1, x.exp())


def test_a_check_of_torch_that_only_raises_is_left_out_too() -> None:
    """That no variance is negative."""
    with pytest.warns(CaptureWarning, match=r"functional.py:\d+ \(elif torch.any\(var < 0\)"):
        capture(Checked(lambda x: likely(x) + x), torch.randn(4, 3))


def test_running_means_of_all_batches_are_refused_by_their_option() -> None:
    """``momentum=None`` weighs each batch by their number, which torch has as one of Python."""
    with pytest.raises(CaptureError, match="a norm with momentum=None divides by its count"):
        capture(Checked(nn.BatchNorm1d(3, momentum=None)), torch.randn(4, 3))


def test_a_choice_is_refused() -> None:
    """Its two ways have other operations."""
    with pytest.raises(CaptureError, match=r"if x.sum\(\) > 0"):
        capture(Checked(chosen), torch.randn(4, 3))


def of_sizes(x: Tensor) -> Tensor:
    steps = torch.arange(x.shape[1]).expand(x.shape[0], -1).diff()
    return x + 1 if (steps[:, -1] == 1).all() else -x


def of_samples(x: Tensor) -> Tensor:
    return x + 1 if torch.arange(x.shape[0]).sum() < 20 else -x


def of_chance(x: Tensor) -> Tensor:
    return x + 1 if torch.rand(()) < 0.5 else -x


def of_written(x: Tensor) -> Tensor:
    flags = torch.zeros(2)
    flags[1].copy_(x[0, 0])
    return x + 1 if flags.any() else -x


FLAGS = torch.tensor([True, False])


def of_flags(x: Tensor) -> Tensor:
    for flag in FLAGS:  # as TabNet tells columns of numbers from others
        x = x + 1 if flag else x.exp()
    return x


def of_chosen(x: Tensor) -> Tensor:
    return x + 1 if x[x > 0].shape[0] - 1 > 3 else -x


def test_a_choice_by_constant_tensors_is_made() -> None:
    """They are part of the captured model, as numbers are, and attributes are compared in steps."""
    captured = capture(Checked(of_flags), torch.randn(4, 3))
    called = [str(node.target) for node in captured.programs.example.calls]
    assert called[:2] == ["aten.add.Tensor", "aten.exp.default"]


def test_a_choice_by_sizes_alone_is_made() -> None:
    """Any batch makes the same one; not so by the number of samples, or by random numbers."""
    captured = capture(Checked(of_sizes), torch.randn(4, 3))
    called = [str(node.target) for node in captured.programs.example.calls]
    assert "aten.add.Tensor" in called
    assert "aten.neg.default" not in called
    for choice in (of_chance, of_written, of_chosen):
        with pytest.raises(CaptureError, match=r"return x \+ 1 if.*needs the value"):
            capture(Checked(choice), torch.randn(4, 3))
    with pytest.raises(CaptureError, match="other operations for 8 samples than for 4 samples"):
        capture(Checked(of_samples), torch.randn(4, 3))


class Branching(nn.Module):
    """A forward that goes one way or another by the values of its buffers."""

    def __init__(self, choice: Callable[[Branching, Tensor], bool]) -> None:
        super().__init__()
        self.choice, self.layer = choice, nn.Linear(3, 1)
        self.register_buffer("table", torch.tensor([[1.0, 0.0]]))
        self.register_buffer("ready", torch.tensor(1))
        self.register_buffer("alias", self.ready)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + 1 if self.choice(self, x) else -x).square().mean()


def initialised(module: Branching, _: Tensor) -> bool:
    return bool(module.ready.item() == 1 and module.table[0, 0] != 0)


def of_its_type(module: Branching, x: Tensor) -> bool:
    times = module.table.flatten().type_as(x) + torch.zeros_like(x[0, :2])  # reads no entry of x
    return bool(times[0] > times[1])


def set_later(module: Branching, _: Tensor) -> bool:
    if module.ready == 1:
        module.ready.fill_(2)
    return True


def counted(module: Branching, _: Tensor) -> bool:
    if module.training:
        module.ready += 1
    return module.training or bool(module.alias > 1)


def test_a_choice_by_buffers_that_stay_is_made() -> None:
    """A table that is made anew where it is zero, a flag of what is initialised; a value that is
    written to, in training at least, decides otherwise in a later step, and any other is compared.
    """
    assert len(capture(Branching(of_its_type), torch.randn(4, 3)).programs.example.calls) > 3
    module = Branching(initialised)
    captured = capture(module, torch.randn(4, 3))
    assert "aten.neg.default" not in [str(node.target) for node in captured.programs.example.calls]
    reads = captured.programs.exporter.reads
    module.ready.copy_(torch.tensor(1))
    assert reads.changed_buffers() == []
    module.ready.fill_(0)
    assert reads.changed_buffers() == ["ready"]
    with pytest.raises(CaptureError, match="by the value of ready the forward goes one way or"):
        capture(Branching(set_later), torch.randn(4, 3))
    with pytest.raises(CaptureError, match="by the value of ready the forward goes one way or"):
        capture(Branching(counted), torch.randn(4, 3)).evaluation()


class Balanced(nn.Module):
    """A layer that keeps its auxiliary loss for its owner, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.balance = y.mean() ** 2
        return y.square().mean() + self.balance


def test_an_attribute_that_the_forward_itself_makes_may_differ() -> None:
    """It is no number of an earlier time, so that a plain call in between changes nothing."""
    module = Balanced()
    captured = capture(module, torch.randn(4, 3))
    module(torch.randn(4, 3))
    assert captured.programs.exporter.reads.changed() == []


class Attention(nn.Module):
    """Attention as transformers has it, with the mask that its configuration makes."""

    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig

        self.config, self.layer = LlamaConfig(attn_implementation="sdpa"), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import create_causal_mask

        positions, h = torch.arange(x.shape[1])[None], self.layer(x)
        mask = create_causal_mask(self.config, h, None, None, positions)
        h = sdpa_attention_forward(self, h[:, None], h[:, None], h[:, None], mask)[0]
        return h.square().mean()


def test_masks_that_no_value_of_the_batch_is_in_are_those_of_a_plain_call() -> None:
    """Without tracing there is none, so attention that is not causal sees all tokens."""
    pytest.importorskip("transformers.masking_utils")
    for place in ("meta", "cpu"):
        captured = capture(Attention().to(place), torch.randn(4, 5, 3, device=place))
        assert len(captured.programs.example.calls) < 20
    assert check_split(captured, torch.randn(4, 5, 3), one_stage(captured), exact=True) == 0.0


class Encoder(nn.Module):
    """LongT5, which makes a mask of its own and reads it."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LongT5Config, LongT5EncoderModel

        sizes = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2}
        config = LongT5Config(**sizes, num_layers=1, local_radius=3, dropout_rate=0.0)
        self.model = LongT5EncoderModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).last_hidden_state.square().mean()


def test_an_encoder_makes_its_mask_as_in_a_plain_call() -> None:
    """Where it is compiled it makes none, and fails."""
    pytest.importorskip("transformers")
    tokens = torch.arange(20).view(4, 5) % 8
    captured = capture(Encoder(), tokens)
    assert check_split(captured, tokens, one_stage(captured), exact=False) < 1e-5


class Masked(nn.Module):
    """A decoder of PyTorch's own; its masks were made with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(self.layer, 1)
        self.causal = nn.Transformer.generate_square_subsequent_mask(3)
        self.register_buffer("near", torch.ones(3, 3).triu(2).bool())

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.stack(x, mask=self.near), mask=self.causal).square().mean()


def test_a_transformer_does_without_the_values_of_its_mask() -> None:
    """They tell which kernel is the faster one."""
    captured, x = capture(Masked(), torch.randn(4, 3, 4)), torch.randn(3, 3, 4)
    assert check_split(captured, x, one_stage(captured), exact=False) < 1e-5
    assert captured.evaluation().graph.ops


def test_code_of_other_libraries_is_not_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its folder begins with the same letters, as that of torchvision does."""
    code = compile("def check(x):\n    assert (x < 100).all()\n    return x\n", LIBRARY, "exec")
    names: dict[str, Callable[[Tensor], Tensor]] = {}
    exec(code, names)
    lines = ["def check(x):\n", "    assert (x < 100).all()\n", "    return x\n"]
    monkeypatch.setitem(linecache.cache, LIBRARY, (0, None, lines, LIBRARY))
    with pytest.warns(CaptureWarning, match=r"torchvision.*ops.py:2 \(assert"):
        capture(Checked(names["check"]), torch.randn(4, 3))


def test_masks_are_made_by_broadcasting_with_the_same_entries() -> None:
    """Gemma3 lets the tokens of an image see each other, by a function that vmap is applied to."""
    masking = pytest.importorskip("transformers.masking_utils")
    blocks = torch.tensor([[-1, 0, 0, -1, 1, 1], [0, 0, 0, 0, -1, -1]])
    function = masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(blocks))
    options = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
    options |= {"use_vmap": True, "allow_is_causal_skip": False}
    expected = masking.sdpa_mask(**options)
    before = masking._vmap_expansion_sdpa
    with library_rules():
        assert masking._vmap_expansion_sdpa is not before
        assert torch.equal(masking.sdpa_mask(**options), expected)
    assert masking._vmap_expansion_sdpa is before


def test_attributes_are_put_back_also_those_that_were_not_there() -> None:
    """After an error too."""

    class Holder:
        here = 1

    def fails() -> None:
        with with_attributes([(Holder, "here", 2), (Holder, "new", 3)]):
            assert (Holder.here, Holder.new) == (2, 3)  # type: ignore[attr-defined]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert Holder.here == 1
    assert not hasattr(Holder, "new")


def test_collection_of_garbage_is_rare_inside_and_as_before_outside() -> None:
    """A user who has switched it off, or made it rarer, finds it so."""
    before = gc.get_threshold()
    try:
        for own, inside in ((700, 20_000), (50_000, 50_000), (0, 0)):
            gc.set_threshold(own, 10, 10)
            with tracing_alone():
                assert gc.get_threshold()[0] == inside
            assert gc.get_threshold() == (own, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_a_name_that_a_library_no_longer_has_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are for private functions, which other versions may lack."""
    monkeypatch.delattr(torch.nn.modules.transformer, "_detect_is_causal_mask")
    with library_rules():
        assert not hasattr(torch.nn.modules.transformer, "_detect_is_causal_mask")
    assert not hasattr(torch.nn.modules.transformer, "_detect_is_causal_mask")


def test_a_process_that_is_forked_while_another_thread_traces_can_trace() -> None:
    """It begins once nothing is patched."""
    begun = threading.Event()

    def trace() -> None:
        with tracing_alone():
            begun.set()
            time.sleep(0.2)

    def entered() -> None:
        with tracing_alone():
            pass

    thread = threading.Thread(target=trace)
    thread.start()
    begun.wait()
    child = multiprocessing.get_context("fork").Process(target=entered)
    child.start()
    child.join(20)
    thread.join()
    child.kill()
    child.join()
    assert child.exitcode == 0


def test_two_threads_that_trace_leave_nothing_patched() -> None:
    """The second begins while the first is in its forward, and would keep what that has patched."""
    before, other = dict(vars(Tensor)), threading.Thread(target=lambda: traced(nn.Tanh()))

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not other.ident:
                other.start()
                other.join(0.2)
            return x.tanh()

    def traced(part: nn.Module) -> None:
        capture(nn.Sequential(nn.Linear(2, 1), part, Mean()), (torch.ones(4, 2),))

    traced(Slow())
    other.join()
    assert dict(vars(Tensor)) == before


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()
