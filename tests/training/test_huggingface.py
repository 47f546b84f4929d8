"""Hugging Face's way of training, by its own rules in a plain loop and as a pipeline."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import get_scheduler
from transformers.feature_extraction_utils import BatchFeature

from anabranch import launch
from anabranch.checkpoint.export import export
from anabranch.data.packed import call_module
from anabranch.errors import TrainingError
from anabranch.graph.capture import capture
from anabranch.multimodal import multimodal_batch
from anabranch.solve import rewriting
from anabranch.training import SaveEvery, planning
from anabranch.training.huggingface import Trainer
from benchmarks.architectures import multimodal
from benchmarks.architectures.models import ARCHITECTURES, build
from benchmarks.architectures.multimodal import ragged, small
from tests.runtime.small import Built, plan
from tests.runtime.training import sgd
from tests.short_searches import shorten

SAMPLES, BATCH = 40, 8
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Models of one layer, and operators that are run, but not timed: what is tried here is how
    models are trained.
    """
    quick = partial(planning.measure_workload, repeats=0)
    monkeypatch.setattr(planning, "measure_workload", quick)
    shorten(monkeypatch)
    for name in ("Bert", "Llama"):
        chosen = ARCHITECTURES[name]
        small = {**chosen.small, "num_hidden_layers": 1}
        monkeypatch.setitem(ARCHITECTURES, name, replace(chosen, small=small))


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens, of which every other is to be found again."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.tokens = torch.randint(0, 60, (count, 8), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index]}


def collate(samples: list[Mapping[str, Tensor]]) -> BatchFeature:
    """As collators for masked language models do, but for chance; their class of batches."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    labels = tokens.clone()
    labels[:, ::2] = -100
    return BatchFeature(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    )


def arguments(**changed: Any) -> SimpleNamespace:
    """The attributes of ``TrainingArguments``, which need another package to be made."""
    return SimpleNamespace(
        **{
            "output_dir": "", "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2, "num_train_epochs": 2.0, "max_steps": 4,
            "learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.99,
            "adam_epsilon": 1e-8, "max_grad_norm": 0.5, "lr_scheduler_type": "linear",
            "warmup_steps": 1, "optim": "adamw_torch", "seed": 3, "bf16": False, "fp16": False,
            "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
            "save_total_limit": 3,
            **changed,
        }
    )  # fmt: skip


def plain_losses(workload: Any, batches: list[Any]) -> list[float]:
    """Four updates of two batches: mean gradients, clipping, AdamW without decay of biases and
    norms, a linear schedule after one update of warm-up.
    """
    torch.manual_seed(0)
    model = workload.module
    named = dict(model.named_parameters())
    plain = [p for name, p in named.items() if "bias" in name or "LayerNorm" in name]
    decayed = [p for p in named.values() if not any(p is other for other in plain)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.99),
    )  # fmt: skip
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=4)
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = model(**batch).loss
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.dist
def test_a_tiny_bert_trains_as_trainer_would(tmp_path: Path):
    """Eight batches of four updates on two ranks have the losses of a plain loop; held-out data is
    evaluated and checkpoints are written after every second update; the last one reloads in
    transformers.
    """
    args = arguments(output_dir=str(tmp_path / "out"))
    model, _ = build("Bert")
    seen: list[Any] = []
    trainer = Trainer(
        model, args, collate, Sentences(), Sentences(12), devices=2, check_gradients=False
    )
    workload = trainer.workload
    captured = capture(model, workload.example)
    captured.evaluation()  # once, not in every rank
    chosen = plan(Built(captured, workload), 2, batch_size=BATCH, microbatch_size=4)

    def rank() -> tuple[tuple[float, ...], list[Any]]:
        from anabranch.training import train

        options = trainer.training_options()
        run = train(
            workload, chosen, captured=captured, check_gradients=False,
            callbacks=[seen.append], **options,
        )  # fmt: skip
        return run.losses, seen

    losses, events = launch.run(rank, 2, timeout=100.0)[0]
    data = [b for epoch in (0, 1) for b in workload.data(BATCH, epoch)][:8]
    assert losses == pytest.approx(plain_losses(workload, data), rel=2e-4)
    assert [e.step for e in events if e.name == "evaluation"] == [4, 8]
    assert [e.step for e in events if e.name == "checkpoint"] == [4, 8]
    made = export(tmp_path / "out", tmp_path / "Bert")
    _, info = transformers.BertForMaskedLM.from_pretrained(made.path, output_loading_info=True)
    assert not any(info.values())
    # Steps of a checkpoint count: six updates have four batches left, four have none.
    again = arguments(output_dir="", resume_from_checkpoint=str(tmp_path / "out"), max_steps=6)
    trainer.args = again
    assert trainer.training_options()["steps"] == 4
    again.max_steps = 4
    with pytest.raises(TrainingError, match=r"nothing is left to do: .* has 8 of 8 steps"):
        trainer.training_options()
    # As Hugging Face's train(resume_from_checkpoint=...), where True is the newest.
    trainer.args = arguments(output_dir=str(tmp_path / "out"), max_steps=6)
    for resume in (True, tmp_path / "out"):
        options = trainer.training_options(resume)
        assert (options["steps"], options["resume"]) == (4, tmp_path / "out")


@pytest.mark.dist
def test_trainer_plans_and_trains_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As docs/coming-from.md has it, on local ranks."""
    monkeypatch.chdir(tmp_path)
    args = arguments(max_steps=1, gradient_accumulation_steps=1, save_strategy="no")
    model, _ = build("Bert")
    names = {"model": model, "args": args, "data_collator": collate}
    names |= {"train_dataset": Sentences(), "eval_dataset": Sentences(6)}
    (block,) = re.findall(r"```python\n(.*?import Trainer.*?)```", PAGE.read_text(), re.DOTALL)
    exec(block, names)
    assert len(names["run"].losses) == 1
    assert (tmp_path / "tuned" / "model.safetensors").exists()


class Joined(torch.nn.Module):
    """Two branches of the same tokens, and a layer that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Embedding(64, 8), torch.nn.Embedding(64, 8)
        self.head = torch.nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """[samples, length] tokens and labels -> loss."""
        joined = torch.cat([self.left(input_ids), self.right(input_ids).tanh()], -1)
        logits = self.head(joined) * attention_mask.unsqueeze(-1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.dist
def test_it_rewrites_the_model_where_that_pays(monkeypatch: pytest.MonkeyPatch):
    """Here always. The model has the trained weights of the layer that was cut."""
    monkeypatch.setattr(rewriting, "SETTINGS", replace(rewriting.SETTINGS, least_gain=-1e9))
    torch.manual_seed(0)
    args = arguments(max_steps=2, gradient_accumulation_steps=1, save_strategy="no")
    trainer = Trainer(Joined(), args, collate, Sentences(), devices=2)
    before = trainer.model.head.weight.detach().clone()
    run = trainer.train()
    assert run.plan.rewrites == ("join-split@head.weight",)
    assert run.gradients.startswith("right")
    assert not torch.equal(trainer.model.head.weight, before)


def test_arguments_are_counted_in_batches():
    """``Trainer`` counts updates; an epoch has five batches of eight here."""
    model, _ = build("Bert")
    args = arguments(max_steps=-1, eval_strategy="epoch", output_dir="out", save_steps=3)
    trainer = Trainer(model, args, collate, Sentences(), Sentences(8), devices=2)

    def options_of(args: Any) -> dict[str, Any]:
        trainer.args = args
        return trainer.training_options()

    options = options_of(args)
    assert trainer.workload.batch_size == BATCH
    assert (options["steps"], options["accumulate"], options["evaluate_every"]) == (10, 2, 5)
    assert (options["save"], options["save_every"]) == (Path("out"), SaveEvery(6, keep=3))
    shares = options_of(arguments(eval_steps=0.5, save_steps=0.3, output_dir="out"))
    assert (shares["evaluate_every"], shares["save_every"].steps) == (4, 4)
    part = arguments(max_steps=-1, num_train_epochs=0.5)  # two batches and a half: three
    assert options_of(part)["steps"] == 3
    # Accumulation goes on across epochs: 15 batches are 4 updates of 4, over which the rate falls.
    long = arguments(max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=4)
    options_of(long)
    assert cast("Any", trainer.workload.scheduler).args == (4,)  # by arguments changed since
    assert options_of(arguments(bf16=True))["compute"].precision == "bf16"
    assert "save" not in options_of(arguments(save_strategy="no"))


def test_what_is_not_taken_over_is_refused():
    """Before anything is planned: what would change training, another optimizer without a recipe,
    and arguments that only Hugging Face's ``Trainer`` has, each with a way on.
    """
    model, _ = build("Bert")

    def trainer(args: Any, size: int = SAMPLES, **options: Any) -> Trainer:
        return Trainer(model, args, collate, Sentences(size), devices=2, **options)

    with pytest.raises(ValueError, match="label_smoothing_factor, torch_compile: arguments of"):
        trainer(arguments(label_smoothing_factor=0.1, torch_compile=True))
    for name in ("adamw_torch_8bit", "adafactor"):
        other = arguments(optim=name)
        with pytest.raises(ValueError, match=f"optimizer {name} is not taken over"):
            trainer(other)
    assert trainer(other, optimizer=sgd).workload.optimizer is sgd
    with pytest.raises(ValueError, match="save_strategy best is not taken over"):
        trainer(arguments(save_strategy="best"))
    other = arguments(lr_scheduler_type="reduce_lr_on_plateau")
    with pytest.raises(ValueError, match="reduce_lr_on_plateau needs a metric"):
        trainer(other)
    with pytest.raises(ValueError, match="has 4 samples, and a batch 8"):
        trainer(arguments(), 4)
    data: Any = (model, arguments(), collate, Sentences())
    strange: Any = {"optimizers": (None, None), "nonsense": 1}
    with pytest.raises(TypeError, match=r"optimizers: give optimizer=.*nonsense: there is no such"):
        Trainer(*data, devices=2, **strange)
    for sets in ((None,), ({"a": Sentences()},), (Sentences(), {"a": Sentences()})):
        with pytest.raises(TypeError, match="a data set with a length and an index, not a"):
            Trainer(model, arguments(), collate, *sets, devices=2)
    called: Any = [transformers.TrainerCallback()]
    with pytest.raises(TypeError, match=r"callbacks are functions of training\.events"):
        Trainer(*data, devices=2, callbacks=called)


class Answers(Sentences):
    """Tokens as lists with the number of a class, or where an answer begins and ends."""

    def __init__(self, **labels: int) -> None:
        super().__init__()
        self.labels = labels

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index].tolist(), **self.labels}


@pytest.mark.parametrize(
    ("kind", "labels", "shapes"),
    [
        ("SequenceClassification", {"label": 1}, ((40, 2), (40,))),
        ("QuestionAnswering", {"start_positions": 2, "end_positions": 4}, ((2, 40, 8), (2, 40))),
    ],
)
def test_labels_are_those_of_the_model(kind: str, labels: Any, shapes: Any):
    """Without a collator lists become tensors and a ``label`` becomes ``labels``; metrics are
    given all labels that the class of the model has.
    """
    config = transformers.BertConfig(**ARCHITECTURES["Bert"].small)
    model = getattr(transformers, f"BertFor{kind}")(config)
    seen: list[Any] = []

    def metrics(found: Any) -> dict[str, float]:
        seen.append((np.shape(found.predictions), np.shape(found.label_ids)))
        return {}

    data = Answers(**labels)
    trainer = Trainer(model, arguments(), None, data, data, devices=2, compute_metrics=metrics)
    model.train().bert.embeddings.eval()  # which are to stay so
    trainer.evaluate()
    assert seen == [shapes]
    assert (model.training, model.bert.embeddings.training) == (True, False)


class Ragged(Sentences):
    """Sentences of 6 to 8 tokens, some of 20, as lists, with a column that no model takes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index].repeat(3)[: 6 + index % 3 if index % 13 else 20].tolist()
        return {"input_ids": tokens, "labels": tokens, "text": "left out"}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w1"))
    made: Any = transformers.PreTrainedTokenizerFast
    return made(tokenizer_object=words, pad_token="w60")


@pytest.mark.dist
def test_padding_to_the_longest_of_a_batch_has_buckets_by_itself(tmp_path: Path):
    """Without a length anywhere: batches are computed in the sizes of the least bucket that holds
    them, with the losses of batches that are padded to their longest alone. After training the
    model has its weights: ``evaluate`` calls ``compute_metrics`` with predictions of all held-out
    samples, and ``save_model`` writes what transformers reads. What ``train`` takes besides goes
    before the arguments.
    """
    args = arguments(max_steps=3, gradient_accumulation_steps=1, save_strategy="no")
    model, _ = build("Llama")
    words, shapes = tokenizer(), list[Any]()
    collator = transformers.DataCollatorForTokenClassification(words)

    def metrics(found: Any) -> dict[str, float]:
        shapes.append((found.predictions.shape, found.label_ids.shape))
        counted = found.label_ids != -100
        right = found.predictions.argmax(-1) == found.label_ids
        return {"accuracy": float(right[counted].mean())}

    trainer = Trainer(
        model, args, collator, Ragged(), Ragged(9), devices=2, processing_class=words,
        compute_metrics=metrics, steps=2,
    )  # fmt: skip
    examples = [trainer.workload.example, *trainer.workload.buckets]
    lengths = [example["input_ids"].shape[1] for example in examples]
    assert lengths[0] == 20
    assert 8 in lengths[1:]
    before = trainer.evaluate()["eval_loss"]

    chosen = trainer.plan(planner="even", max_replicas=1)
    run = trainer.train(chosen)
    assert len(run.plan.stage_graph.stages) == 2
    untrained, _ = build("Llama")
    data = list(trainer.workload.data(BATCH, 0))[:2]
    optimizer = trainer.workload.make_optimizer(list(untrained.named_parameters()))
    scheduler = trainer.workload.make_scheduler(optimizer)
    losses = []
    for batch in data:
        longest = int(batch["attention_mask"].sum(1).max())
        loss = untrained(**{name: leaf[:, :longest] for name, leaf in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(untrained.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert run.losses == pytest.approx(losses, rel=1e-5)

    found = trainer.evaluate(metric_key_prefix="test")
    assert found["test_loss"] < before
    assert 0 <= found["test_accuracy"] <= 1
    assert shapes[-1] == ((9, 20, 64), (9, 20))
    trainer.save_model(tmp_path / "saved")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    model.eval()
    given = {name: data[0][name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.equal(model(**given).logits, again(**given).logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token == "w60"


class Pictured(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A picture and a text for each sample, as a processor gives them."""

    def __init__(self, count: int) -> None:
        self.samples = [ragged("Llava", (1,), seed=number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


@pytest.mark.dist
def test_a_vision_language_model_trains_with_the_collator_of_its_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses of training and of ``evaluate`` are those of the model's own forward, here with one
    layer that reads text.
    """
    monkeypatch.setattr(multimodal, "_TEXT", {**multimodal._TEXT, "num_hidden_layers": 1})
    model, untrained, data = small("Llava"), small("Llava"), Pictured(16)
    untrained.load_state_dict(model.state_dict())
    model.model.vision_tower.requires_grad_(False)

    def own(samples: list[Any]) -> dict[str, Tensor]:
        return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}

    def packed(samples: list[Any]) -> Any:
        return multimodal_batch(model, own(samples), images=1)

    args = arguments(max_steps=1, gradient_accumulation_steps=1, warmup_steps=0, save_strategy="no")
    trainer = Trainer(model, args, packed, data, devices=2)
    whole = own(data.samples)
    before = untrained.eval()(**whole).loss.item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(before, rel=1e-4)
    (batch,) = list(trainer.workload.data(BATCH, 0))[:1]
    run = trainer.train(trainer.plan(planner="even", max_replicas=1))
    expected = call_module(untrained.train(), batch).loss.item()
    assert run.losses == pytest.approx([expected], rel=1e-5)
    assert trainer.evaluate(data)["eval_loss"] != pytest.approx(before, rel=1e-4)
