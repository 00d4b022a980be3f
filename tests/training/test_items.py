"""What a loss is the mean of is found by asking the model: the gradient is the full batch's, in
float64, or a refusal. No name of a class decides.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from gradmem_lib import Recipe, prepare, step
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


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen2"])
def test_models_in_bf16_are_not_refused(family):
    cls = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
    model = tiny_model(cls, no_dropout(cls.config_class())).bfloat16()
    batch = ragged()
    expected, _ = full_gradient(model, batch, True)
    found, _ = accumulated(model, batch)
    assert (found - expected).norm() <= 0.03 * expected.norm()


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
    # Which layers PEFT refuses to load additions for is not asked of the layer yet.
    assert [place for place in found if not place.startswith("adapters")] == []
