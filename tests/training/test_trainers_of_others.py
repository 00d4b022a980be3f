"""Trainers that others write on ``Trainer``: preferences with a reference model, precomputed
log-probabilities, samples that are drawn inside a step. ``MemoryCallback`` watches and changes no
bit. trl's own trainers are tried where trl is installed.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from support.trainers import small
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gradmem_lib import MemoryCallback, MemoryTracker, check_accumulation, diagnose

SECOND_MODELS = ("The weights are there more than once", "A second model is in memory")
PROMPT, REST, VOCABULARY = 4, 8, 512


class Pairs(torch.utils.data.Dataset):
    """A prompt with a chosen and a rejected answer, (2, PROMPT + REST)."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCABULARY, (2, PROMPT + REST), generator=generator)
        ids[1, :PROMPT] = ids[0, :PROMPT]
        return {"input_ids": ids}


def log_probabilities(model, ids):
    """Of each row's answer, (rows,)."""
    log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None])[:, PROMPT - 1 :, 0].sum(1)


class OfPreferences(Trainer):
    """As trl's DPOTrainer: a loss of its own, and a reference model or what it said before."""

    reference = None
    said: dict | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"].flatten(0, 1)
        log_p = log_probabilities(model, ids)
        if self.said is None:
            with torch.no_grad():
                before = log_probabilities(self.reference, ids)
        else:
            before = torch.stack([self.said[tuple(row.tolist())] for row in ids])
        gain = (log_p - before).view(-1, 2)
        return -F.logsigmoid(0.1 * (gain[:, 0] - gain[:, 1])).mean()


class OfSamples(OfPreferences):
    """As trl's GRPOTrainer: it draws answers inside the step, and scores them by two models."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"][:, 0]
        with torch.no_grad():
            for _ in range(2):
                logits = model(input_ids=ids).logits[:, -1]
                drawn = torch.multinomial(logits.softmax(-1), 1)
                ids = torch.cat([ids, drawn], 1)
            old = log_probabilities(model, ids)
            far = log_probabilities(self.reference, ids) - old
        reward = ids.float().std(1)
        ratio = (log_probabilities(model, ids) - old).exp()
        return -(ratio * (reward - reward.mean() + 0.1 * far)).mean()


class Weights(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **more):
        self.found = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def trained(kind, tmp_path, watch, accumulation, precompute=False):
    """The weights after two steps, and what watched them."""
    torch.manual_seed(0)
    model = small(layers=2)
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        optim="sgd",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    weights = Weights()
    trainer = kind(model, arguments, train_dataset=Pairs(), callbacks=[weights])
    trainer.remove_callback(PrinterCallback)
    trainer.reference = copy.deepcopy(model).requires_grad_(False)
    trainer.model_accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides
    if precompute:
        with torch.no_grad():
            pairs = Pairs()
            rows = torch.cat([pairs[i]["input_ids"] for i in range(len(pairs))])
            said = log_probabilities(trainer.reference, rows)
        trainer.said = {tuple(row.tolist()): one for row, one in zip(rows, said, strict=True)}
        trainer.reference = None
    watched = None
    if watch is None:
        trainer.train()
    elif watch is MemoryTracker:
        with MemoryTracker(model, live=False) as watched:
            trainer.train()
    else:
        with MemoryCallback(live=False) as watched:
            trainer.add_callback(watched)
            trainer.train()
    return weights.found, watched


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", [OfPreferences, OfSamples])
def test_a_trainer_of_ones_own_is_watched_to_the_bit(kind, accumulation, tmp_path):
    plain, _ = trained(kind, tmp_path, None, accumulation)
    for watch in (MemoryCallback, MemoryTracker):
        found, watched = trained(kind, tmp_path, watch, accumulation)
        assert torch.equal(found, plain)
        causes = [cause.name for cause in diagnose(watched).causes]
        assert any(cause in SECOND_MODELS for cause in causes)
        assert "Losses are added up before one backward" not in causes


def test_the_remedy_for_a_reference_model_takes_its_weights_away(tmp_path):
    found = {}
    for precompute in (False, True):
        weights, watched = trained(OfPreferences, tmp_path, MemoryCallback, 4, precompute)
        found[precompute] = weights, watched.peak.total, diagnose(watched)
    torch.testing.assert_close(found[True][0], found[False][0])
    causes = [cause for cause in found[False][2].causes if cause.name in SECOND_MODELS]
    assert found[True][1] <= found[False][1] - 0.9 * causes[0].nbytes
    assert not [cause for cause in found[True][2].causes if cause.name in SECOND_MODELS]


# The same with trl itself, which the course does not install.


def words(count, seed):
    drawn = random.Random(seed)
    return " ".join(f"w{drawn.randrange(40)}" for _ in range(count))


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    known = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(40))])}
    inside = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inside.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end, unknown = special
    return PreTrainedTokenizerFast(
        tokenizer_object=inside, pad_token=pad, bos_token=begin, eos_token=end, unk_token=unknown
    )


def of_trl(name, trl, folder, accumulation, callbacks, **settings):
    prompts = [{"prompt": words(4 + i, i), "chosen": " " + words(2 + i, 50 + i)} for i in range(8)]
    rows = [row | {"rejected": " " + words(3, 90 + i)} for i, row in enumerate(prompts)]
    more, given = {}, {}
    torch.manual_seed(0)
    model = small(layers=2)
    if name == "SFT":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    if name == "DPO":
        given["ref_model"] = copy.deepcopy(model)
    if name == "GRPO":
        rows = [{"prompt": row["prompt"]} for row in rows]
        given["reward_funcs"] = lambda completions, **more: [float(len(c)) for c in completions]
        more = {"num_generations": 4, "max_completion_length": 4}
    arguments = getattr(trl, f"{name}Config")(
        str(folder),
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **more,
        **settings,
    )
    from datasets import Dataset

    return getattr(trl, f"{name}Trainer")(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **given,
    )


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_trl_is_watched_to_the_bit(name, accumulation, tmp_path):
    trl = pytest.importorskip("trl")
    plain, watched = Weights(), Weights()
    trainer = of_trl(name, trl, tmp_path, accumulation, [plain])
    torch.manual_seed(5)
    trainer.train()
    with MemoryCallback(live=False) as memory:
        trainer = of_trl(name, trl, tmp_path, accumulation, [watched, memory])
        torch.manual_seed(5)
        trainer.train()
    assert torch.equal(watched.found, plain.found)
    assert sorted(memory.by_step) == [1, 2]
    assert "Losses are added up" not in str(diagnose(memory))


def test_of_trls_losses_the_sum_of_two_means_is_refused(tmp_path):
    trl = pytest.importorskip("trl")
    check_accumulation(of_trl("SFT", trl, tmp_path, 4, []))
    check_accumulation(of_trl("DPO", trl, tmp_path, 4, []))
    two = of_trl("DPO", trl, tmp_path, 4, [], loss_type=["sigmoid", "sft"])
    with pytest.raises(ValueError, match="trains another loss with DPOTrainer"):
        check_accumulation(two)
