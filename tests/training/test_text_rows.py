"""Rows of text of unequal lengths, without labels: the gradient of each row by itself, weighted by
its tokens.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.families import tiny_config, with_dropout
from support.trainers import trainer_for
from transformers import BertLMHeadModel, GPT2LMHeadModel, LlamaForCausalLM

from gradmem_lib import Recipe
from gradmem_lib.training.text_rows import collate_text

LENGTHS = (3, 17, 8, 2, 30, 5, 11, 8)
# Without the mask, BERT, which looks both ways, would read the padding.
MODELS = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel, "bert": BertLMHeadModel}


def texts(with_mask: bool) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in LENGTHS:
        rows.append({"input_ids": torch.randint(1, 96, (length,), generator=generator).tolist()})
        if with_mask:
            rows[-1]["attention_mask"] = [1] * length
    return rows


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("with_mask", [False, True])
def test_unequal_rows_without_labels_train_as_each_row_alone(family, with_mask, tmp_path):
    torch.manual_seed(0)
    model = MODELS[family](with_dropout(tiny_config(family), 0.0))
    alone, rows = copy.deepcopy(model), texts(with_mask)
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
