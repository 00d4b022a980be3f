"""What tests of checkpointing run: a chain of layers, small models of six families, and their
steps.
"""

import torch
from support.families import tiny_config, with_dropout
from torch import nn

from gradmem_lib.compat.modules import call_override
from gradmem_lib.model.classes import model_class

ROWS, WIDTH = 16, 16
X = ROWS * WIDTH * 4
# so that the gradient which the loss sends back is a tensor of X bytes
WEIGHTS = torch.rand(ROWS, WIDTH)


def weighted(y):
    return y * WEIGHTS


N = 6
HF = ("llama", "qwen2", "qwen3", "gpt2", "bert", "vit")


def block():
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 8)
    )


class Looped(nn.Module):
    """A ModuleList called in a loop, each layer with a mask by keyword; layers return a tuple."""

    class Layer(nn.Sequential):
        def forward(self, x, *, mask):
            return (x + super().forward(x) * mask, None)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(*block()) for _ in range(N))

    def forward(self, x):
        mask = torch.linspace(0, 1, 8)
        for layer in self.layers:
            x = layer(x, mask=mask)[0]
        return x


PLAIN = {"sequential": lambda: nn.Sequential(*(block() for _ in range(N))), "modulelist": Looped}
FAMILIES = (*HF, *PLAIN)


def made(family):
    torch.manual_seed(0)
    if family in PLAIN:
        return PLAIN[family]().train()
    config = with_dropout(tiny_config(family, num_hidden_layers=N), 0.2)
    return model_class(config)(config).train()


def batch_for(family):
    torch.manual_seed(1)
    if family in PLAIN:
        return torch.randn(3, 8)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    ids = torch.randint(2, 50, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def layers_of(family, model):
    return model.layers if family == "modulelist" else model


def step(family, model, batch, *, autocast=False, use_cache=False):
    """Loss and gradients of one training step with a fixed random state."""
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if family in PLAIN:
            loss = model(batch).square().sum()
        elif family in ("vit", "bert"):
            loss = model(**batch).loss
        else:
            loss = model(**batch, use_cache=use_cache).loss
    loss.backward()
    return loss.detach(), taken(model)


def taken(model):
    """The gradients, taken off the model."""
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def untouched(model):
    return not any(call_override(m) or m._forward_pre_hooks for m in model.modules())
