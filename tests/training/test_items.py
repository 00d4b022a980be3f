"""What a loss is the mean of is found by asking the model: the gradient is the full batch's, in
float64, or a refusal. No name of a class decides.
"""

from __future__ import annotations

import ast
import copy
import math
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from gradmem_lib import Recipe, prepare, step
from gradmem_lib.training.item_rules import labels
from gradmem_lib.training.items import find_rule
from gradmem_lib.training.losses import predicts_next_token
from gradmem_lib.training.tiny import VOCABULARY, tiny_model

LENGTHS = (3, 20, 9, 14)


def ragged(lengths=LENGTHS):
    width = max(lengths)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def no_dropout(config):
    for name, value in vars(config).items():
        if ("drop" in name or "pdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def gradient(model):
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads).double()


def full_gradient(model, batch, shifted):
    """The full batch's, from the logits and by this test's own sum."""
    logits = model(**{name: t for name, t in batch.items() if name != "labels"}).logits
    targets = batch["labels"]
    if shifted:
        logits, targets = logits[:, :-1], targets[:, 1:]
    if targets.dim() == 2:
        logits = logits.flatten(0, 1)
    log_p = logits.double().log_softmax(-1)
    targets = targets.flatten()
    counted = targets != -100
    picked = log_p.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    loss = -(picked * counted).sum() / counted.sum()
    loss.backward()
    found = gradient(model)
    model.zero_grad()
    return found, loss.item()


class Keep(torch.optim.SGD):
    """Keeps the gradients that a step would use."""

    def step(self, closure=None):
        self.found = torch.cat(
            [p.grad.flatten() for g in self.param_groups for p in g["params"] if p.grad is not None]
        ).double()


def accumulated(model, batch, pieces=4, loss=None):
    recipe = Recipe(precision=None, optimizer="sgd", accumulation=pieces, attention=None)
    prepare(model, recipe)
    optimizer = Keep(model.parameters(), lr=0.0)
    found = step(model, optimizer, batch, recipe, loss=loss)
    return optimizer.found, found.item()


FAMILIES = {
    "LlamaForCausalLM": True,
    "GPT2LMHeadModel": True,
    "Qwen2ForCausalLM": True,
    "MistralForCausalLM": True,
    "GemmaForCausalLM": True,
    "OPTForCausalLM": True,
    "GPTNeoXForCausalLM": True,
    "PhiForCausalLM": True,
    "BertForMaskedLM": False,
    "BertForSequenceClassification": False,
    "ElectraForTokenClassification": False,
    "RobertaForMaskedLM": False,
    "DistilBertForTokenClassification": False,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_renamed_subclass_trains_as_its_parent(family):
    parent = getattr(transformers, family)
    renamed = type("MyModel", (parent,), {"__module__": __name__})
    config = no_dropout(parent.config_class())
    torch.manual_seed(0)
    model = tiny_model(renamed, config).double()
    batch = ragged()
    if family.endswith("SequenceClassification"):
        batch["labels"] = torch.tensor([0, 1, 1, 0])
    if family.endswith("TokenClassification"):
        batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["labels"] % 2)
    expected, loss = full_gradient(model, batch, FAMILIES[family])
    found, mean = accumulated(model, batch)
    # the models' losses are computed in float32
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert mean == pytest.approx(loss, rel=1e-6)
    assert predicts_next_token(model) == FAMILIES[family]


# Losses that are no mean over items.

WEIGHTS = torch.tensor([0.3, 4.7])


def body(cls=transformers.BertModel):
    torch.manual_seed(0)
    return tiny_model(cls, no_dropout(transformers.BertConfig()))


class ClassWeights(transformers.BertForSequenceClassification):
    def forward(self, labels=None, **inputs):
        out = super().forward(**inputs)
        out.loss = F.cross_entropy(out.logits, labels, weight=WEIGHTS)
        return out


class TwoMeans(transformers.LlamaForCausalLM):
    def forward(self, labels=None, **inputs):
        out = super().forward(labels=labels, **inputs)
        out.loss = out.loss + out.logits[:, -1].square().mean()
        return out


class Zero(transformers.LlamaForCausalLM):
    """Its head ignores label 0, not -100."""

    def forward(self, labels=None, **inputs):
        out = super().forward(**inputs)
        logits, targets = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        out.loss = F.cross_entropy(logits, targets, ignore_index=0)
        return out


class Preference(transformers.LlamaForCausalLM):
    """The first half of the rows is preferred to the second."""

    def forward(self, labels=None, **inputs):
        out = super().forward(**inputs)
        score = out.logits.mean((1, 2))
        half = len(score) // 2
        return {"loss": -F.logsigmoid(score[:half] - score[half:]).mean()}


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = body()

    def forward(self, query, passage):
        a, b = (self.encoder(ids).last_hidden_state[:, 0] for ids in (query, passage))
        similar = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
        return F.cross_entropy(similar / 0.05, torch.arange(len(a)))


class SumNotMean(transformers.LlamaForCausalLM):
    def forward(self, labels=None, **inputs):
        out = super().forward(labels=labels, **inputs)
        out.loss = out.loss * (labels[:, 1:] != -100).sum()
        return out


def llama(cls):
    return tiny_model(cls, transformers.LlamaConfig())


def classified():
    batch = ragged()
    return batch | {"labels": torch.tensor([0, 0, 0, 1])}


def zeros():
    """All rows are equally long, so that nothing but the label 0 is left out."""
    batch = ragged((12, 12, 12, 12))
    batch["labels"][3, 5:] = 0
    return batch


def pairs():
    ids = torch.randint(3, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
    return {"query": ids, "passage": ids.flip(1)}


def two_heads():
    batch = ragged()
    return batch | {"next_sentence_label": torch.tensor([0, 1, 1, 1])}


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (body(ClassWeights), classified()),
        (llama(TwoMeans), ragged()),
        (llama(Zero), zeros()),
        (llama(Preference), ragged()),
        (Contrastive(), pairs()),
        (llama(SumNotMean), ragged()),
        (body(transformers.BertForPreTraining), two_heads()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_mean_over_items_is_refused_and_left_alone(model, batch):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"is no mean over labels or rows.*accumulation=1"):
        accumulated(model, batch)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    accumulated(model, batch, pieces=1)  # uncut, any loss is right


@pytest.mark.parametrize("pieces", [2, 4])
def test_a_function_that_is_given_is_asked_too(pieces):
    model, batch = llama(transformers.LlamaForCausalLM).double(), ragged()

    def smoothed(model, micro):
        logits = model(micro["input_ids"], attention_mask=micro["attention_mask"]).logits[:, :-1]
        targets = micro["labels"][:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.1)

    smoothed(model, batch).backward()
    expected = gradient(model)
    model.zero_grad()
    found, _ = accumulated(model, batch, pieces, smoothed)
    assert (found - expected).norm() <= 1e-12 * expected.norm()
    with pytest.raises(ValueError, match="is no mean over labels or rows"):
        accumulated(model, batch, pieces, lambda m, b: smoothed(m, b) + m(b["input_ids"])[0].std())


def test_losses_that_cancel_are_not_refused():
    """Advantages of unlike signs, whose mean is 0: the loss has a gradient all the same."""
    model, batch = llama(transformers.LlamaForCausalLM), ragged((12, 12, 12, 12))
    advantage = torch.tensor([1.0, -2.0, 4.0, -3.0])

    def policy_gradient(model, micro):
        logits = model(micro["input_ids"]).logits[:, :-1].log_softmax(-1)
        log_p = logits.gather(-1, micro["input_ids"][:, 1:, None])[..., 0].mean(1)
        return -(micro["advantage"] * (log_p - log_p.detach() + 0.1)).mean()

    batch["advantage"] = advantage
    policy_gradient(model, batch).backward()
    expected = gradient(model)
    model.zero_grad()
    found, _ = accumulated(model, batch, 4, policy_gradient)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def denoising(model, batch):
    """A diffusion model's: it predicts the noise that was added to its input."""
    embedded = model.get_input_embeddings()(batch["input_ids"])
    noise = torch.randn_like(embedded)
    hidden = model.model(inputs_embeds=embedded + noise).last_hidden_state
    return (hidden - noise).square().mean()


def dropping(model, batch):
    """Dropout that does not look at the model's mode."""
    hidden = model.model(batch["input_ids"]).last_hidden_state
    logits = model.lm_head(F.dropout(hidden, 0.5))[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten())


class Counting:
    """A loss that changes what it reads."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return model(**batch).loss * self.calls


@pytest.mark.parametrize("loss", [denoising, dropping, Counting()])
def test_a_loss_with_its_own_noise_is_told_so(loss):
    model, batch = llama(transformers.LlamaForCausalLM), ragged((12, 12, 12, 12))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"draw random numbers in the data's collator") as raised:
        accumulated(model, batch, 2, loss)
    assert "compares rows with each other" not in str(raised.value)
    assert torch.equal(torch.get_rng_state(), state)
    accumulated(model, batch, 1, loss)


def test_noise_that_comes_with_the_rows_or_only_in_training_is_right():
    """What the refusal advises."""
    model, batch = llama(transformers.LlamaForCausalLM).double(), ragged((12, 12, 12, 12))
    del batch["attention_mask"]
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    batch["noise"] = torch.randn(4, 12, hidden, generator=generator, dtype=torch.float64)

    def given_noise(model, micro):
        embedded = model.get_input_embeddings()(micro["input_ids"])
        found = model.model(inputs_embeds=embedded + micro["noise"]).last_hidden_state
        return (found - micro["noise"]).square().mean()

    given_noise(model, batch).backward()
    expected = gradient(model)
    model.zero_grad()
    found, _ = accumulated(model, batch, 2, given_noise)
    assert (found - expected).norm() <= 1e-12 * expected.norm()

    def only_in_training(model, micro):
        hidden = model.model(micro["input_ids"]).last_hidden_state
        logits = model.lm_head(F.dropout(hidden, 0.5, training=model.training))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), micro["labels"][:, 1:].flatten())

    assert accumulated(model, batch, 2, only_in_training)[1] > 0


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen2"])
def test_models_in_bf16_are_not_refused(family):
    cls = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
    model = tiny_model(cls, no_dropout(cls.config_class())).bfloat16()
    batch = ragged()
    expected, _ = full_gradient(model, batch, True)
    found, _ = accumulated(model, batch)
    assert (found - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.filterwarnings("error:.*more than rounding seems")
def test_a_loss_that_is_itself_in_bf16_is_not_refused():
    """Each item's loss is rounded, and then their mean: by more than half of eps."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = no_dropout(transformers.BertConfig())
        model = tiny_model(transformers.BertForMaskedLM, config).to(torch.bfloat16)
        found, _ = accumulated(model, ragged((120, 120, 60, 10)))
        assert found.isfinite().all()


# A training may start from weights that hide what a loss does.


class ZeroHead(transformers.LlamaForCausalLM):
    """Its head begins at 0, so that all tokens have the same loss. Each row is one item."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight.data.zero_()

    def forward(self, labels=None, **inputs):
        logits = super().forward(**inputs).logits[:, :-1]
        each = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        return {"loss": (each.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()}


class Balanced(ZeroHead):
    """A router's loss, whose experts are all alike at the start: it compares rows."""

    def forward(self, labels=None, **inputs):
        out = super().forward(labels=labels, **inputs)
        chosen = self.lm_head(self.model(inputs["input_ids"]).last_hidden_state).softmax(-1)
        return {"loss": out["loss"] + 0.01 * VOCABULARY * chosen.mean((0, 1)).square().sum()}


class OwnReference(nn.Module):
    """A preference loss as KTO's, relative to the mean of the batch: at the start, the model still
    is its own reference, and all rows have the same loss.
    """

    def __init__(self):
        super().__init__()
        self.policy = llama(transformers.LlamaForCausalLM)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, input_ids, labels):
        gains = []
        for model in (self.policy, self.reference):
            log_p = model(input_ids).logits[:, :-1].log_softmax(-1)
            gains.append(log_p.gather(-1, input_ids[:, 1:, None])[..., 0].sum(1))
        gain = gains[0] - gains[1]
        return {"loss": (1 - torch.sigmoid(gain - gain.detach().mean())).mean()}


def pairs_of(batch):
    return {name: batch[name] for name in ("input_ids", "labels")}


def test_a_head_of_zeros_does_not_hide_what_an_item_is():
    model, batch = llama(ZeroHead).double(), ragged()
    model(**batch)["loss"].backward()
    expected = gradient(model)
    model.zero_grad()
    found, _ = accumulated(model, batch)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("model", [llama(Balanced), OwnReference()], ids=["router", "KTO"])
def test_weights_at_the_start_do_not_hide_a_loss_that_compares_rows(model):
    batch = pairs_of(ragged((9, 9, 9, 9)))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="with a few other numbers in its weights, 3 rows"):
        accumulated(model, batch)
    assert all(map(torch.equal, before, model.parameters()))


def test_an_autocast_around_the_step_does_not_keep_the_other_numbers():
    found = []
    for pieces in (1, 4):  # only pieces are asked
        torch.manual_seed(0)
        model = llama(transformers.LlamaForCausalLM)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(accumulated(model, ragged(), pieces)[0])
    assert (found[1] - found[0]).norm() <= 0.02 * found[0].norm()


# What a forward leaves for the next one.


class Queue(nn.Module):
    """Compares each row with the embeddings of earlier rows."""

    def __init__(self, in_forward):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.in_forward = nn.Linear(6, 4), in_forward
        self.register_buffer("queue", torch.randn(8, 4))

    def forward(self, x):
        embedded = self.encoder(x)
        loss = (embedded @ self.queue.T.clone()).logsumexp(1) - embedded.square().sum(1)
        if self.training and self.in_forward:
            self.enqueue(x)
        return {"loss": loss.mean()}

    @torch.no_grad()
    def enqueue(self, x):
        self.queue = torch.cat([self.encoder(x), self.queue])[:8]


class Warming(nn.Module):
    """The weight of its second part grows with each forward."""

    def __init__(self):
        super().__init__()
        self.encoder, self.calls = nn.Linear(6, 4), 0

    def forward(self, x):
        self.calls += self.training
        embedded = self.encoder(x)
        return embedded.square().mean() + self.calls / 100 * embedded.abs().mean()


def numbers(seed=1):
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("model", [Queue(in_forward=True), Warming()], ids=["queue", "counter"])
def test_a_forward_that_changes_what_the_next_one_reads_is_refused(model):
    before = [p.clone() for p in model.parameters()]
    for seed in (1, 2):  # trying again does not help
        with pytest.raises(
            ValueError, match=r"after optimizer\.step\(\).*though no trained weight has"
        ):
            accumulated(model, numbers(seed))
        model.zero_grad()
    assert all(map(torch.equal, before, model.parameters()))
    accumulated(model, numbers(), pieces=1)


def test_a_queue_that_changes_after_the_step_is_right():
    """What the refusal advises."""
    model, batch = Queue(in_forward=False), numbers()
    for _ in range(2):
        model.zero_grad()
        model(**batch)["loss"].backward()
        expected = gradient(model)
        model.zero_grad()
        found, _ = accumulated(model, batch)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        model.enqueue(batch["x"])


# Which loss was asked.


def loss_reduced(how):
    return lambda model, micro: F.mse_loss(model(micro["x"]), micro["x"][:, :1], reduction=how)


def test_the_same_code_with_another_word_is_asked_again():
    model, batch = nn.Linear(6, 1), numbers()
    accumulated(model, batch, loss=loss_reduced("mean"))
    with pytest.raises(ValueError, match="is no mean over labels or rows"):
        accumulated(model, batch, loss=loss_reduced("sum"))


Named = namedtuple("Named", "x labels")


@pytest.mark.parametrize("kind", [dict, Named])
@pytest.mark.parametrize("missing", [math.nan, -100])
def test_a_regression_counts_what_is_there(kind, missing):
    """Missing targets are nan, or are left out by the mask (here in a dict only)."""
    x = numbers()["x"]
    mask = (x > 0).long()
    batch = {"x": x, "labels": x.flip(0).masked_fill(mask == 0, missing)}
    if kind is dict:
        batch["attention_mask"] = mask
    elif missing == -100:
        return  # nothing in a namedtuple of these two says what is missing

    def loss(model, micro):
        labels = micro["labels"] if kind is dict else micro.labels
        x = micro["x"] if kind is dict else micro.x
        there = ~labels.isnan() & (labels != -100)
        return F.mse_loss(model(x)[there], labels[there])

    model, batch = nn.Linear(6, 6), kind(**batch)
    loss(model, batch).backward()
    expected = gradient(model)
    model.zero_grad()
    found, _ = accumulated(model, batch, loss=loss)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_policy_counts_the_words_of_its_samples():
    """A loss over the words that the mask shows after the first, without labels."""
    model, batch = llama(transformers.LlamaForCausalLM), ragged()
    del batch["labels"]
    batch["advantage"] = torch.tensor([1.0, -2.0, 4.0, -3.0])

    def loss(model, micro):
        logits = model(micro["input_ids"]).logits[:, :-1].log_softmax(-1)
        log_p = logits.gather(-1, micro["input_ids"][:, 1:, None])[..., 0]
        ratio = (log_p - log_p.detach()).exp()
        there = micro["attention_mask"][:, 1:]
        return -(ratio * micro["advantage"][:, None] * there).sum() / there.sum()

    loss(model, batch).backward()
    expected = gradient(model)
    model.zero_grad()
    found, _ = accumulated(model, batch, loss=loss)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_an_error_of_the_model_is_not_taken_for_its_loss():
    def breaks(model, micro):
        raise RuntimeError("size mismatch")

    with pytest.raises(ValueError, match=r"this raised RuntimeError: size mismatch") as raised:
        accumulated(nn.Linear(6, 1), numbers(), loss=breaks)
    assert "compares rows" not in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_batches_without_rows_are_not_taken_at_their_word():
    """Packed rows with the places where they begin, or graphs with their edges."""
    model = nn.Linear(6, 2)
    micro = {"x": torch.randn(3, 6), "edges": torch.zeros(7, 2), "labels": torch.tensor([0, 1, 1])}
    ask = partial(find_rule, model, loss_of=None, default=labels, how="accumulation=2")
    with pytest.warns(
        UserWarning, match="different numbers of rows. The loss is taken as the mean"
    ):
        assert ask([micro, micro]) is None
    with pytest.raises(ValueError, match=r"no labels of whole numbers.*accumulation=1"):
        ask([micro | {"labels": torch.randn(3)}])


def test_a_tuple_begins_with_the_loss():
    class Pair(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out.square().mean(), out

    model = Pair(6, 1)
    model(**numbers())[0].backward()
    expected = gradient(model)
    model.zero_grad()
    found, _ = accumulated(model, numbers())
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_no_decision_by_a_name():
    """Outside of f-strings, which print it, no class's name is read in what trains."""
    root = Path(predicts_next_token.__code__.co_filename).parents[1]
    files = [*(root / "training").glob("*.py"), root / "techniques" / "accumulation.py"]
    files += [root / "techniques" / "losses.py", root / "techniques" / "data_parallel.py"]
    found = []
    for file in files:
        tree = ast.parse(file.read_text())
        printed = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                printed |= {id(inner) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            named = isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__")
            if named and id(node) not in printed:
                found.append(f"{file.name}:{node.lineno}")
    assert found == []
