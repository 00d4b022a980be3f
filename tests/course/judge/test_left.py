"""What an answer leaves behind, in the process or on its arguments, is told and put back."""

import os
import random
import threading
from dataclasses import replace

import numpy
import pytest
import torch.utils.flop_counter
from course.judge.toy_exercise import AREA, area, exercise_of
from torch import nn

from gradmem_lib.course.judge import side_effects
from gradmem_lib.course.judge.verdict import PASSED, judge


def state() -> dict:
    """The state of all switches, but for modules that are imported on the way."""
    return side_effects.state() | {"the environment": os.environ.get("PATH")}


# A statement of an answer, and what it leaves in another state.
STATES = {
    "torch.set_grad_enabled(False)": "gradients",
    "torch.autocast('cpu', torch.bfloat16).__enter__()": "autocast for the CPU",
    "torch.set_autocast_enabled('cpu', True)": "autocast for the CPU",
    "torch.set_autocast_dtype('cpu', torch.float16)": "the dtype of autocast for the CPU",
    "torch.set_autocast_cache_enabled(False)": "autocast's cache",
    "torch.set_default_dtype(torch.float64)": "the default dtype",
    "torch.set_default_device('meta')": "the default device",
    "torch.autograd.set_detect_anomaly(True)": "anomaly detection",
    "torch.set_num_threads(2)": "the number of threads",
    "torch.utils.flop_counter.FlopCounterMode().__enter__()": "modes that watch operations",
    "nn.modules.module.register_module_forward_hook(lambda *given: None)": "hooks on every module",
    "torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__()": "saved-tensor hooks",
    "os.chdir('/')": "the working directory",
    "os.environ.pop('PATH', None)": "the environment",
    "import gc; gc.disable()": "garbage collection",
}


@pytest.mark.parametrize("statement", STATES)
def test_the_state_of_the_process_is_told_and_put_back(statement):
    torch.set_num_threads(1)
    before = state()

    def answer(width, height):
        exec(statement)
        return width * height

    says = f"Your code leaves another state of {STATES[statement]} than before, for all code"
    assert says in judge(AREA, answer).line
    assert state() == before

    def fails(width, height):
        exec(statement)
        raise ValueError("stop")

    assert "raised ValueError" in judge(AREA, fails).line
    assert state() == before
    assert judge(AREA, area).outcome == PASSED


def test_a_variable_that_an_import_sets_is_no_answers_doing(monkeypatch):
    monkeypatch.setenv("GRADMEM_X", "")
    monkeypatch.delenv("GRADMEM_X")

    def imports(width, height):
        os.environ["GRADMEM_X"] = "1"
        return width * height

    assert judge(AREA, imports).outcome == PASSED


def test_a_thread_that_still_runs_is_told():
    stop = threading.Event()

    def answer(width, height):
        threading.Thread(target=stop.wait, daemon=True).start()
        return width * height

    try:
        assert "Your code leaves a thread that still runs" in judge(AREA, answer).line
    finally:
        stop.set()


def test_everybody_draws_the_same_numbers_and_seeds_are_put_back():
    def draws():
        return random.random(), numpy.random.rand(), torch.rand(2)

    def states():
        return (
            random.getstate(),
            numpy.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )

    drawn = exercise_of(draws, lambda f: f())
    random.seed(5)
    before = states()
    assert judge(drawn, lambda: draws()).outcome == PASSED
    assert states() == before

    def seeds(width, height):
        random.seed(3)
        numpy.random.seed(3)
        torch.manual_seed(3)
        return width * height

    assert judge(AREA, seeds).outcome == PASSED and states() == before


class Model(nn.Module):
    """A model with dropout, a switch for checkpoints, and a config as transformers' have them."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(2, 2), nn.Dropout(0.5)
        self.gradient_checkpointing = False
        fields = {"use_cache": True, "to_dict": lambda self: {"use_cache": self.use_cache}}
        self.config = type("Config", (), fields)()

    def forward(self, x):
        return self.layer(x)


def count(model, weights, optimizer):
    return len(list(model.parameters())) + len(weights)


def arguments():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    return Model(), [nn.Parameter(torch.ones(2))], optimizer


COUNTING = exercise_of(count, lambda f: f(*arguments()))


# A statement of an answer, what it leaves with another what, and the change that allows it.
LEFT = [
    ("model.eval()", "`model` with another mode", "model.mode"),
    ("model.requires_grad_(False)", "`model` with another requires_grad", "model"),
    ("model.layer.register_forward_hook(abs)", "`model` with another hook", "model.hook"),
    ("model.layer.forward = model.layer.forward", "`model` with another attribute", "model.hook"),
    ("model.dropout.p = 0.0", "`model` with another dropout", "model"),
    (
        "model.gradient_checkpointing = True",
        "`model` with another checkpointing",
        "model.checkpointing",
    ),
    (
        "model.config.use_cache = False",
        "`model` with another config (config.use_cache)",
        "model.config",
    ),
    ("optimizer.param_groups[0]['lr'] = 1.0", "`optimizer` with another lr", "optimizer.lr"),
    ("model.bfloat16()", "`model` with another dtype", None),
    ("model(torch.ones(1, 2)).sum().backward()", "`model` with another gradient", None),
    ("weights[0].square().sum().backward()", "`weights` with another gradient", None),
    ("weights[0].requires_grad_(False)", "`weights` with another requires_grad", None),
    ("weights[0].data = weights[0].data.bfloat16()", "`weights` with another dtype", None),
]


@pytest.mark.parametrize(("statement", "said", "allowed"), LEFT)
def test_what_an_answer_leaves_on_its_arguments_is_told(statement, said, allowed):
    def answer(model, weights, optimizer):
        exec(statement)
        return count(model, weights, optimizer)

    assert f"Your code leaves {said}" in judge(COUNTING, answer).line
    free = judge(replace(COUNTING, changes=allowed or "model weights"), answer)
    if allowed:
        assert free.outcome == PASSED
    else:  # not even where the argument may change
        assert f"Your code leaves {said}" in free.line
    # What the right answer leaves, an answer may leave.
    assert judge(replace(COUNTING, right=answer), answer).outcome == PASSED


def test_train_mode_may_stay_where_it_is_asked_for_and_eval_mode_not():
    def trains(model, weights, optimizer):
        model.train()
        return count(model, weights, optimizer)

    def evaluates(model, weights, optimizer):
        model.eval()
        return count(model, weights, optimizer)

    either = replace(COUNTING, changes="model.train")
    assert judge(either, trains).outcome == PASSED
    assert "another mode" in judge(either, evaluates).line


def test_an_answer_that_trains_may_leave_its_gradients_and_zeros_are_none():
    def step(model, weights, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        return count(model, weights, optimizer)

    def leaves_gradients(model, weights, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return count(model, weights, optimizer)

    def leaves_zeros(model, weights, optimizer):
        weights[0].grad = torch.zeros_like(weights[0])
        return count(model, weights, optimizer)

    assert judge(replace(COUNTING, right=step), leaves_gradients).outcome == PASSED
    assert judge(COUNTING, leaves_zeros).outcome == PASSED
