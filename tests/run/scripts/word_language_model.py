"""An LSTM on words, updated by hand, that can be stopped by Ctrl-C and still tests its best
weights.
"""

import math
import signal
import sys

import torch
from torch import nn

torch.manual_seed(1111)
ntokens, bptt, lr = 50, 8, 2.0
corpus = (torch.arange(1600) * 3 % ntokens).view(4, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntokens, 32)
        self.rnn = nn.LSTM(32, 32, 2, dropout=0.2)
        self.decoder = nn.Linear(32, ntokens)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).view(-1, ntokens).log_softmax(1), hidden

    def init_hidden(self, rows):
        weight = next(self.parameters())
        return weight.new_zeros(2, rows, 32), weight.new_zeros(2, rows, 32)


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


model = RNNModel()
criterion = nn.NLLLoss()


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(4)
    with torch.no_grad():
        for i in range(0, len(source) - 1, bptt):
            data, targets = source[i : i + bptt], source[i + 1 : i + 1 + bptt]
            output, hidden = model(data[: len(targets)], hidden)
            total += len(targets) * criterion(output, targets.reshape(-1)).item()
    return total / (len(source) - 1)


def train():
    model.train()
    hidden = model.init_hidden(4)
    for batch, i in enumerate(range(0, 80, bptt)):
        data, targets = corpus[i : i + bptt], corpus[i + 1 : i + 1 + bptt].reshape(-1)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        if batch % 5 == 0:
            print(f"batch {batch} loss {loss.item()!r} ppl {math.exp(loss.item())!r}")
        if "--interrupt" in sys.argv and batch == 7:
            signal.raise_signal(signal.SIGINT)


try:
    for epoch in range(2):
        train()
        print(f"end of epoch {epoch}: {evaluate(corpus[80:160])!r}")
except KeyboardInterrupt:
    print("Exiting from training early")
print(f"End of training: {evaluate(corpus[160:240])!r}")
sys.exit(0)
