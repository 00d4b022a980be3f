"""A user's module is predicted as it is: its mode, its functions, its own libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from support.predicted import assert_predicted, config, tracked
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.training.recipe import Recipe

AS_IT_IS = Recipe(precision=None, attention=None)


def measured_loop(model, batch) -> MemoryTracker:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

    def one_step():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    one_step()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        one_step()
    return tracker


def ids(vocabulary: int = 128) -> dict:
    tokens = torch.randint(3, vocabulary, (2, 16))
    return {"input_ids": tokens, "labels": tokens}


def checkpointed():
    model = AutoModelForCausalLM.from_config(config("llama"))
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return model


def with_dropout():
    small = config("bert", 2)
    small._attn_implementation = "eager"
    return AutoModelForMaskedLM.from_config(small)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (checkpointed, "checkpointing is on and does"),
        (with_dropout, "dropout does nothing"),
    ],
)
def test_the_mode_stays(make, says, training):
    model = make().train(training)
    found = predict(model, batch=ids(), recipe=AS_IT_IS, target="cpu")
    assert found.peak == measured_loop(model, ids()).peak
    assert all(module.training == training for module in model.modules())
    assert (says in " ".join(found.notes)) != training


def test_a_part_in_eval_mode_stays_so():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    model[1].eval()
    off = predict(model, batch=torch.rand(9, 64), loss=lambda m, x: m(x).mean(), target="cpu")
    model.train()
    on = predict(model, batch=torch.rand(9, 64), loss=lambda m, x: m(x).mean(), target="cpu")
    assert on.peak_by_phase["forward"] > off.peak_by_phase["forward"]
    assert off.notes == on.notes == ()


class KeepsFeatures(nn.Module):
    """Its hook keeps what a layer returns, in a dict of the model that the hook's closure holds."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.features: dict[str, torch.Tensor] = {}

        def keep(module, inputs, output):
            self.features["up"] = output

        self.up.register_forward_hook(keep)

    def forward(self, x):
        out = self.down(self.up(x).relu()).square().mean()
        return out + self.features.pop("up").square().mean()


def test_a_hook_that_holds_its_model():
    model, x = KeepsFeatures(), torch.rand(4, 8)
    found = predict(model, batch=x, recipe=AS_IT_IS, target="cpu")
    assert model.features == {}
    assert found.peak == tracked(model, x, AS_IT_IS).peak


def test_a_function_that_holds_itself():
    model, x = nn.Linear(8, 8), torch.rand(4, 8)

    def twice(x, again=True):
        x = F.linear(x, model.weight).relu()
        return twice(x, again=False) if again else x

    model.forward = lambda x: twice(x).mean()
    found = predict(model, batch=x, recipe=AS_IT_IS, target="cpu")
    assert found.peak == tracked(model, x, AS_IT_IS).peak


def remembers_a_mask():
    mask = None

    def masked(x):
        nonlocal mask
        if mask is None:
            mask = torch.ones(x.shape[-1])
        return x * mask

    return masked


class RemembersAMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.masked = nn.Linear(8, 8), remembers_a_mask()

    def forward(self, x):
        return self.masked(self.linear(x)).mean()


def test_a_closure_keeps_no_tensor_without_values():
    model, x = RemembersAMask(), torch.rand(4, 8)
    predict(model, batch=x, recipe=AS_IT_IS, target="cpu")
    assert model(x).isfinite()


class Recorder:
    def __init__(self):
        self.lock = threading.Lock()  # which cannot be copied
        self.calls = 0

    def note(self):
        self.calls += 1


def notes_calls(model):
    note = Recorder().note
    return lambda module, inputs, out: note()


def has_a_layer_as_a_default(model):
    """As where hooks are made in a loop."""
    return lambda module, inputs, out, other=model[1]: other(out)


@pytest.mark.parametrize("hook", [notes_calls, has_a_layer_as_a_default])
def test_what_a_hook_holds_beside_its_model(hook):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.rand(4, 8)
    model[0].register_forward_hook(hook(model))
    assert_predicted(model, x, AS_IT_IS, lambda model, x: model(x).mean())


class HoldsElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(8, 8)
        other = nn.Linear(8, 8)
        self.elsewhere = [lambda x: other(x)]

    def forward(self, x):
        return self.elsewhere[0](self.own(x)).mean()


class Drops(nn.Module):
    """Leaves itself out with a probability, as LoHa does."""

    def __init__(self, p: float, how: str):
        super().__init__()
        self.linear, self.p, self.how = nn.Linear(8, 8), p, how

    def forward(self, x):
        dice = torch.rand(1)
        kept = {
            "gt": lambda: dice > self.p,
            "ge": lambda: dice >= self.p,
            "lt": lambda: not (dice < self.p),
            "le": lambda: not (dice <= self.p),
            "any": lambda: (dice > self.p).any(),
        }[self.how]()
        return (self.linear(x).exp() if kept else self.linear(x)).mean()


@pytest.mark.parametrize("how", ["gt", "ge", "lt", "le", "any"])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_drop_that_always_or_never_happens_is_known(how, p):
    assert_predicted(Drops(p, how), torch.rand(4, 8), AS_IT_IS)


class ChecksWeights(nn.Module):
    def __init__(self, weights: bool):
        super().__init__()
        self.linear, self.weights = nn.Linear(8, 8), weights

    def forward(self, x):
        out = self.linear(x)
        checked = self.linear.weight[0] if self.weights else out
        if checked.isinf().any() or torch.isnan(checked).any():
            raise RuntimeError("infinite")
        return out.mean()


def test_weights_are_finite_and_activations_are_not_known():
    assert_predicted(ChecksWeights(True), torch.rand(4, 8), AS_IT_IS)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ChecksWeights(False), "reads a tensor's value"),
        (Drops(0.5, "gt"), "reads a tensor's value"),
        (HoldsElsewhere(), "a parameter that is not in the module"),
    ],
)
def test_what_is_not_known_is_refused(model, says):
    with pytest.raises(CannotTrace, match=says):
        predict(model, batch=torch.rand(4, 8), recipe=AS_IT_IS, target="cpu")


def test_a_plain_module_needs_no_library_of_others(tmp_path):
    """With a torchvision and a transformers that cannot be imported."""
    for name in ("torchvision", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('does not fit this torch')")
    program = (
        "import torch\n"
        "from gradmem_lib.prediction.predict import predict\n"
        "model = torch.nn.Linear(8, 1)\n"
        "batch = torch.rand(2, 8)\n"
        "loss = lambda m, x: m(x).mean()\n"
        "print(predict(model, batch=batch, loss=loss, target='cpu').peak.total)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    found = predict(
        nn.Linear(8, 1), batch=torch.rand(2, 8), loss=lambda m, x: m(x).mean(), target="cpu"
    )
    assert int(done.stdout) == found.peak.total


def test_the_scores_that_adaloras_loop_keeps_are_in_a_note():
    peft = pytest.importorskip("peft")
    options = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "total_step": 9}
    adapter = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)
    base = AutoModelForCausalLM.from_config(config("llama", 2))
    model = peft.get_peft_model(base, adapter)
    ids = torch.randint(0, 90, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    [note] = predict(model, batch=batch, recipe=AS_IT_IS, target="cpu").notes
    model(**batch).loss.backward()
    model.base_model.update_and_allocate(0)
    allocator = model.base_model.rankallocator
    tables = allocator.ipt, allocator.exp_avg_ipt, allocator.exp_avg_unc
    kept = sum(tensor.nbytes for table in tables for tensor in table.values())
    assert kept > 0
    assert f"keeps {kept:,} bytes" in note


class NormalizedWeights(nn.Module):
    """Its weights are computed from others before each forward, and kept until the next one."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)]
        self.layers = nn.Sequential(*[norm_of_weight(layer) for layer in layers])

    def forward(self, x):
        return self.layers(x).square().mean()


def norm_of_weight(layer: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(layer) if isinstance(layer, nn.Linear) else layer


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("fields", [{}, {"accumulation": 2}, {"precision": "autocast-bf16"}])
def test_weights_that_a_hook_computes(fields):
    assert_predicted(NormalizedWeights(), torch.rand(6, 8), Recipe(**fields))


class ComputedOnce(nn.Module):
    """What it has computed from a weight is there from the beginning, and its graph too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.doubled = self.linear.weight * 2

    def forward(self, x):
        return (self.linear(x) @ self.doubled.detach()).square().mean()


def test_what_no_forward_computes_again_is_refused():
    with pytest.raises(CannotTrace, match=r"the model holds a tensor of shape \(8, 8\)"):
        predict(ComputedOnce(), batch=torch.rand(6, 8), target="cpu")


def test_a_gradient_with_a_graph_is_refused():
    model, x = nn.Linear(8, 1), torch.rand(6, 8)
    model(x).square().mean().backward(create_graph=True)
    with pytest.raises(CannotTrace, match=r"\(1, 8\) has a graph.*zero_grad"):
        predict(model, batch=x, loss=lambda m, x: m(x).mean(), target="cpu")
