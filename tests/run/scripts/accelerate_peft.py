"""Pairs of sentences with LoRA and accelerate: accumulation, a schedule, gathered metrics."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def main():
    accelerator = Accelerator(cpu="--cpu" in sys.argv, gradient_accumulation_steps=2)
    set_seed(42)
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in torch.randint(5, 128, (48, 24))]
    train, evaluation = DataLoader(rows[:32], 8, shuffle=True), DataLoader(rows[32:], 8)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=128, intermediate_size=64, **sizes)
    model = get_peft_model(BertForSequenceClassification(config), LoraConfig("SEQ_CLS", r=4))
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(
        model, optimizer, train, evaluation, scheduler
    )
    for epoch in range(2):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {loss.item()!r}")
        model.eval()
        right = 0
        for batch in evaluation:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
            right += (guesses == labels).sum().item()
        accelerator.print(f"epoch {epoch}: {right} of {len(rows) - 32}")


if __name__ == "__main__":
    main()
