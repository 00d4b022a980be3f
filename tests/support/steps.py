"""Training steps on small models, for the tests of the tracker."""

import contextlib

import torch
import torch.nn.functional as F
from support.families import tiny_config, with_dropout
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib.model.classes import model_class


class Blocks(nn.Module):
    """Blocks in a row, each of which can be checkpointed, and a loss."""

    def __init__(self, blocks, head, checkpointed):
        super().__init__()
        self.blocks, self.head, self.checkpointed = nn.ModuleList(blocks), head, checkpointed

    def forward(self, x, labels):
        for block in self.blocks:
            # nothing here is random, and the tracker cannot see saved random-number states
            x = (
                checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
                if self.checkpointed
                else block(x)
            )
        return F.cross_entropy(self.head(x.flatten(1)).float(), labels)


def conv_net(checkpointed):
    blocks = [
        nn.Sequential(
            nn.Conv2d(c, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
        )
        for c in (3, 32, 32)
    ]
    return Blocks(blocks, nn.Linear(32 * 16 * 16, 10), checkpointed)


def mlp(checkpointed):
    blocks = [
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
    ]
    return Blocks(blocks, nn.Linear(256, 10), checkpointed)


# Of transformers: the family, and what its config has besides the sizes.
OF_TRANSFORMERS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
}
OWN = {"cnn": conv_net, "mlp": mlp}
MODELS = (*OF_TRANSFORMERS, *OWN)


def made(name: str, checkpointed: bool, hidden: int) -> nn.Module:
    if name in OWN:
        return OWN[name](checkpointed)
    family, more = OF_TRANSFORMERS[name]
    sizes = {"vocab_size": 256, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    config = with_dropout(tiny_config(family, **sizes, num_hidden_layers=3, **more), 0.0)
    config.use_cache = False
    model = model_class(config)(config)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=False),
}


def build(
    name, *, precision="float32", checkpointed=False, optimizer="adamw", seq_len=48, hidden=64
):
    """A model, its optimizer, a batch, and one training step on it."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = made(name, checkpointed, hidden).to(dtype).train()
    opt = OPTIMIZERS[optimizer](model.parameters())
    if name in OWN:
        shape = (32, 3, 16, 16) if name == "cnn" else (64, 256)
        batch = (torch.randn(shape, dtype=dtype), torch.randint(0, 10, shape[:1]))
    else:
        ids = torch.randint(0, 256, (2, seq_len))
        batch = (ids, ids.clone())

    def step():
        cast = contextlib.nullcontext()
        if precision == "autocast":
            cast = torch.autocast("cpu", torch.bfloat16)
        with cast:
            if name in OWN:
                loss = model(*batch)
            else:
                loss = model(input_ids=batch[0], labels=batch[1]).loss
        loss.backward()
        del loss
        opt.step()
        opt.zero_grad(set_to_none=True)

    return model, opt, batch, step


def forward_then_backward(model, batch):
    def step():
        model(input_ids=batch[0], labels=batch[1]).loss.backward()

    return step
