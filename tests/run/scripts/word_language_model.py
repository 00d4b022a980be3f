"""An LSTM on words, updated by hand, that can be stopped by Ctrl-C and still tests its weights."""

import math
import signal
import sys

import torch
from torch import nn

torch.manual_seed(1111)
ntokens, bptt, lr = 50, 8, 2.0
corpus = (torch.arange(1600) * 3 % ntokens).view(4, -1).t().contiguous()
criterion = nn.CrossEntropyLoss()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntokens, 32)
        self.rnn = nn.LSTM(32, 32, 2, dropout=0.2)
        self.decoder = nn.Linear(32, ntokens)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).view(-1, ntokens), hidden


model = RNNModel()


def losses(source):
    """Of one stretch of words after the other, with the state that the last one has left."""
    hidden = None
    for i in range(0, 80, bptt):
        output, hidden = model(source[i : i + bptt], hidden)
        hidden = tuple(v.detach() for v in hidden)
        yield criterion(output, source[i + 1 : i + 1 + bptt].reshape(-1))


def evaluate(source):
    model.eval()
    with torch.no_grad():
        return sum(loss.item() for loss in losses(source))


def train():
    model.train()
    for batch, loss in enumerate(losses(corpus)):
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        print(f"batch {batch} loss {loss.item()!r} ppl {math.exp(loss.item())!r}")
        if "--interrupt" in sys.argv and batch == 7:
            signal.raise_signal(signal.SIGINT)


try:
    for epoch in range(2):
        train()
        print(f"end of epoch {epoch}: {evaluate(corpus[80:])!r}")
except KeyboardInterrupt:
    print("Exiting from training early")
print(f"End of training: {evaluate(corpus[160:])!r}")
sys.exit(0)
