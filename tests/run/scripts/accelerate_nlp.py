"""Pairs of sentences with accelerate: prepare, accumulate, a schedule, and metrics that are
gathered.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 128, (48, 24), generator=generator)
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    train = DataLoader(rows[:32], shuffle=True, batch_size=batch_size, drop_last=True)
    return train, DataLoader(rows[32:], batch_size=batch_size)


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
        )
    ).to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    steps = len(train_dataloader) * config["num_epochs"] // 2
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 1, steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {loss.item()!r}")
        model.eval()
        right = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            guesses = outputs.logits.argmax(dim=-1)
            guesses, references = accelerator.gather_for_metrics((guesses, batch["labels"]))
            right, total = right + (guesses == references).sum().item(), total + len(references)
        accelerator.print(f"epoch {epoch}: {right} of {total}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 8}, args)


if __name__ == "__main__":
    main()
