"""Rows of text of unequal lengths, without labels: the gradient of each row by itself, weighted by
its tokens.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.trainers import small, trainer_for
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from gradmem_lib import Recipe
from gradmem_lib.training.text_rows import collate_text

LENGTHS = (3, 17, 8, 2, 30, 5, 11, 8)


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0)
    ).eval()


def bidirectional():
    """Without the mask it would read the padding."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertLMHeadModel(BertConfig(vocab_size=512, intermediate_size=64, **sizes))


def texts(with_mask: bool) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(1, 512, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids} | ({"attention_mask": [1] * length} if with_mask else {}))
    return rows


@pytest.mark.parametrize("build", [small, gpt2, bidirectional])
@pytest.mark.parametrize("with_mask", [False, True])
def test_unequal_rows_without_labels_train_as_each_row_alone(build, with_mask, tmp_path):
    torch.manual_seed(0)
    model = build()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    alone = copy.deepcopy(model)
    rows = texts(with_mask)
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        loss = alone(input_ids=ids, labels=ids).loss * (ids.numel() - 1)
        (loss / (sum(LENGTHS) - len(LENGTHS))).backward()
    recipe = Recipe(optimizer="sgd", accumulation=2)
    settings = {"train_dataset": rows, "max_steps": 1, "learning_rate": 1.0}
    trainer_for(model, recipe, tmp_path, **settings).train()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        moved = theirs.detach() - ours.detach()
        torch.testing.assert_close(moved, theirs.grad, rtol=0, atol=1e-6)  # float32


def test_other_rows_are_collated_as_before():
    equal = collate_text([{"input_ids": [1, 2], "labels": [3, 4]}] * 2)
    assert equal.keys() == {"input_ids", "labels"}
    assert equal["input_ids"].tolist() == [[1, 2]] * 2 and equal["labels"].tolist() == [[3, 4]] * 2
    assert "pixel_values" in collate_text([{"input_ids": [1], "pixel_values": [0.5]}])
    assert "attention_mask" not in collate_text([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
