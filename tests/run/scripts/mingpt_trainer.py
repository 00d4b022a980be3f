"""Sorting with a small transformer, and workers that load data."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

LENGTH = 6


class SortDataset(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, idx):
        digits = (torch.arange(LENGTH) * (idx + 1)) % 3
        cat = torch.cat((digits, digits.sort()[0]))
        y = cat[1:].clone()
        y[: LENGTH - 1] = -1
        return cat[:-1], y


class Sorter(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tok_emb = nn.Embedding(3, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, 3)

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        return self.lm_head(self.transformer(self.tok_emb(idx), mask=mask, is_causal=True))


if __name__ == "__main__":
    torch.manual_seed(3407)
    model = Sorter()
    loader = DataLoader(SortDataset(), 16, shuffle=True, num_workers=int(sys.argv[1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-1)
            model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(f"train loss {loss.item()!r}")
    with torch.no_grad():
        print(model.eval()(torch.tensor([[0, 0, 2, 1, 0, 1]])).argmax(-1).tolist())
