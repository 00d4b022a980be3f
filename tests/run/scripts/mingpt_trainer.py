"""Sorting with a small transformer: a Trainer class with callbacks, and workers that load data."""

import sys
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class SortDataset(Dataset):
    def __init__(self, length=6, digits=3):
        self.length, self.digits = length, digits

    def __len__(self):
        return 64

    def __getitem__(self, idx):
        inp = (torch.arange(self.length) * (idx + 1)) % self.digits
        sol = torch.sort(inp)[0]
        cat = torch.cat((inp, sol))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Sorter(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tok_emb = nn.Embedding(3, width)
        self.pos_emb = nn.Parameter(torch.zeros(1, 12, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, 3)

    def forward(self, idx, targets=None):
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        logits = self.lm_head(self.transformer(x, mask=mask, is_causal=True))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx)
            idx = torch.cat((idx, logits[:, -1:].argmax(-1)), dim=1)
        return idx


class Trainer:
    def __init__(self, model, train_dataset, max_iters, num_workers):
        self.model, self.train_dataset = model, train_dataset
        self.max_iters, self.num_workers = max_iters, num_workers
        self.callbacks = defaultdict(list)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks[onevent]:
            callback(self)

    def run(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, betas=(0.9, 0.95))
        loader = DataLoader(
            self.train_dataset, shuffle=True, batch_size=16, num_workers=self.num_workers
        )
        self.model.train()
        batches = iter(loader)
        while self.iter_num < self.max_iters:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            _, self.loss = self.model(*batch)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1


def batch_end_callback(trainer):
    if trainer.iter_num % 2 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item()!r}")


if __name__ == "__main__":
    torch.manual_seed(3407)
    model = Sorter()
    trainer = Trainer(model, SortDataset(), max_iters=6, num_workers=int(sys.argv[1]))
    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
    model.eval()
    print(model.generate(torch.tensor([[0, 0, 2, 1, 0, 1]]), 6).tolist())
