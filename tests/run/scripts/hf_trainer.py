"""A transformers Trainer on a tiny model. Its evaluation keeps all logits for a metric."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Rows(Dataset):
    def __init__(self, n):
        self.rows = (torch.arange(n * 16).view(n, 16) * 7) % 512

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def compute_metrics(prediction):
    guesses = prediction.predictions.argmax(-1)
    return {"accuracy": float(np.mean(guesses[:, :-1] == prediction.label_ids[:, 1:]))}


def main():
    set_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, intermediate_size=64, **sizes)
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir="trained",
            max_steps=4,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=8,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Rows(32),
        eval_dataset=Rows(96),
        compute_metrics=compute_metrics,
    )
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()
    for entry in trainer.state.log_history:
        kept = {key: entry[key] for key in ("loss", "eval_loss", "eval_accuracy") if key in entry}
        print(entry["step"], kept)


if __name__ == "__main__":
    main()
