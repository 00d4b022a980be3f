"""What an answer leaves behind in the process, and on the weights that it was given."""

import gc
import inspect
import os
import pkgutil
import random
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from course.judge.toy_exercise import AREA, area, exercise_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gradmem_lib.course.judge as course_judge
from gradmem_lib.course.judge.side_effects import process_state
from gradmem_lib.course.judge.verdict import PASSED, WRONG, judge


def state() -> dict:
    """The state of the process, but for modules that are imported on the way."""
    return process_state() | {"modules": 0, "the environment": os.environ.get("PATH")}


def sets_a_variable():
    os.environ["GRADMEM_TEST_VARIABLE"] = "1"


def removes_a_variable():
    os.environ.pop("PATH", None)


def prints_tensors_short():
    torch.set_printoptions(precision=1)


def prints_arrays_short():
    numpy.set_printoptions(precision=1)


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: os.chdir("/"), "the working directory changed"),
        (sets_a_variable, "GRADMEM_TEST_VARIABLE in the environment"),
        (removes_a_variable, "PATH in the environment"),
        (lambda: sys.setrecursionlimit(5000), "the recursion limit changed"),
        (prints_tensors_short, "the way in which tensors are printed changed"),
        (prints_arrays_short, "the way in which numpy prints changed"),
        (gc.disable, "garbage collection changed"),
        (lambda: numpy.seterr(all="raise"), "what numpy does at errors changed"),
        (lambda: torch.set_autocast_cache_enabled(False), "autocast's cache off"),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            "the precision of float32 products at medium",
        ),
        (lambda: torch.set_num_threads(2), "the number of threads at 2"),
        (
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            "the choice of attention kernels changed",
        ),
        (lambda: FlopCounterMode().__enter__(), "modes that watch operations changed"),
    ],
)
def test_the_state_of_the_process_is_told_and_put_back(leave, said):
    torch.set_num_threads(1)
    before, cache = state(), torch.is_autocast_cache_enabled()

    def answer(width, height):
        leave()
        return width * height

    assert f"your code leaves {said}" in judge(AREA, answer).line
    assert state() == before and torch.is_autocast_cache_enabled() == cache

    def fails(width, height):
        leave()
        raise ValueError("stop")

    assert "raised ValueError" in judge(AREA, fails).line
    assert state() == before and torch.is_autocast_cache_enabled() == cache
    assert "GRADMEM_TEST_VARIABLE" not in os.environ
    assert judge(AREA, area).outcome == PASSED


@pytest.mark.parametrize(
    "file", [file.name for file in pkgutil.iter_modules(course_judge.__path__)]
)
def test_an_answer_is_not_judged_by_functions_of_its_own(file):
    judge(AREA, area)  # which imports all that judges
    module = sys.modules[f"{course_judge.__name__}.{file}"]
    functions = {name: it for name, it in vars(module).items() if inspect.isfunction(it)}
    for name in functions:

        def answer(width, height, name=name):
            setattr(module, name, lambda *_, **__: None)
            return 0

        assert judge(AREA, answer).outcome == WRONG, name
        assert getattr(module, name) is functions[name], name


@pytest.mark.parametrize(
    "file", [file.name for file in pkgutil.iter_modules(course_judge.__path__)]
)
def test_an_answer_is_not_judged_by_builtins_of_its_own(file):
    judge(AREA, area)
    module = sys.modules[f"{course_judge.__name__}.{file}"]
    for name in ("all", "isinstance", "len", "setattr", "vars"):

        def answer(width, height, name=name):
            setattr(module, name, lambda *_: True)
            return 0

        assert judge(AREA, answer).outcome == WRONG, name
        assert name not in vars(module), name


def test_what_restores_torchs_switches_is_not_the_answers():
    judge(AREA, area)
    side_effects = sys.modules[f"{course_judge.__name__}.side_effects"]
    dtype = torch.get_default_dtype()

    def answer(width, height):
        torch.set_default_dtype(torch.float64)
        at_the_beginning = side_effects.switches() | {"the default dtype": dtype}
        side_effects.switches = lambda: at_the_beginning
        return width * height

    judge(AREA, answer)
    assert torch.get_default_dtype() == dtype


def test_a_variable_that_an_import_sets_is_no_answers_doing(tmp_path, monkeypatch):
    text = "import os\nos.environ['GRADMEM_TEST_OF_A_MODULE'] = '1'\n"
    (tmp_path / "gradmem_test_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GRADMEM_TEST_OF_A_MODULE", "0")
    monkeypatch.delenv("GRADMEM_TEST_OF_A_MODULE")

    def imports(width, height):
        import gradmem_test_module

        return width * height if gradmem_test_module else 0

    assert judge(AREA, imports).outcome == PASSED
    assert os.environ["GRADMEM_TEST_OF_A_MODULE"] == "1"


def test_a_thread_that_still_runs_is_told():
    stop = threading.Event()

    def answer(width, height):
        threading.Thread(target=stop.wait, daemon=True).start()
        return width * height

    def joined(width, height):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return width * height

    try:
        assert "your code leaves a thread that still runs" in judge(AREA, answer).line
    finally:
        stop.set()
    assert judge(AREA, joined).outcome == PASSED


def test_the_seeds_of_python_and_numpy_are_put_back_without_a_word():
    def seeded(width, height):
        random.seed(3)
        numpy.random.seed(3)
        return width * height

    random.seed(11)
    numpy.random.seed(11)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    assert judge(AREA, seeded).outcome == PASSED
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states


def test_every_candidate_draws_the_same_from_python_and_numpy():
    drawn = exercise_of(lambda: (random.random(), numpy.random.rand()), lambda f: f())
    random.seed(5)
    assert judge(drawn, lambda: (random.random(), float(numpy.random.rand()))).outcome == PASSED


class Switched(nn.Module):
    """A layer that has a switch for checkpoints, as those of transformers have."""

    def __init__(self):
        super().__init__()
        self.layer, self.gradient_checkpointing = nn.Linear(2, 2), False

    def forward(self, x):
        return self.layer(x)


def count(model, weights):
    return len(list(model.parameters())) + len(weights)


COUNTING = exercise_of(count, lambda f: f(Switched(), [nn.Parameter(torch.ones(2))]))


def test_weights_that_may_change_must_go_on_to_require_a_gradient():
    def freezes(model, weights):
        weights[0].requires_grad_(False)
        return count(model, weights)

    line = judge(replace(COUNTING, changes=("weights",)), freezes).line
    assert "leaves `weights` with weights that require no gradient any more" in line


def learns(model, weights):
    model(torch.ones(1, 2)).sum().backward()


def learns_of_a_list(model, weights):
    weights[0].square().sum().backward()


def narrows_a_list(model, weights):
    weights[0].data = weights[0].data.bfloat16()


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda model, weights: model.bfloat16(), "`model` with weights of another dtype"),
        (narrows_a_list, "`weights` with weights of another dtype"),
        (learns, "`model` with gradients in .grad"),
        (learns_of_a_list, "`weights` with gradients in .grad"),
        (
            lambda model, weights: setattr(model, "gradient_checkpointing", True),
            "`model` with checkpointing on",
        ),
        (lambda model, weights: model.layer.eval(), "`model` with eval mode on"),
    ],
)
@pytest.mark.parametrize("changes", [(), ("model.hook",)])
def test_what_an_answer_leaves_on_weights_is_told(leave, said, changes):
    def answer(model, weights):
        leave(model, weights)
        return count(model, weights)

    exercise = replace(COUNTING, changes=changes)
    assert f"your code leaves {said}" in judge(exercise, answer).line
    # What the reference leaves, an answer may leave.
    assert judge(replace(exercise, reference=answer), answer).outcome == PASSED


class Evaluates:
    """An answer that is an object, as a helper class makes one."""

    def __call__(self, model, weights):
        model.eval()
        return count(model, weights)


@pytest.mark.parametrize("answer", [Evaluates(), partial(Evaluates.__call__, None)])
def test_an_answer_is_watched_in_any_form(answer):
    assert "`model` with eval mode on" in judge(COUNTING, answer).line


def test_weights_keep_their_dtype_even_where_they_may_change():
    def answer(model, weights):
        narrows_a_list(model, weights)
        return count(model, weights)

    free = replace(COUNTING, changes=("model", "weights"))
    assert "weights of another dtype" in judge(free, answer).line


def test_train_mode_may_stay_where_it_is_asked_for_and_eval_mode_not():
    def trains(model, weights):
        model.train()
        return count(model, weights)

    def evaluates(model, weights):
        model.eval()
        return count(model, weights)

    weights = [nn.Parameter(torch.ones(2))]
    in_eval = replace(COUNTING, changes=("model.train",), observe=lambda f: f(Switched(), weights))
    assert judge(in_eval, trains).outcome == PASSED
    assert "eval mode on" in judge(in_eval, evaluates).line
    given_in_eval = replace(in_eval, observe=lambda f: f(Switched().eval(), weights))
    assert judge(given_in_eval, trains).outcome == PASSED
    assert judge(given_in_eval, evaluates).outcome == PASSED


def test_an_answer_that_trains_may_leave_its_gradients():
    def step(model, weights, *, zero):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if zero:
            optimizer.zero_grad()
        return count(model, weights)

    def reference(model, weights):
        return step(model, weights, zero=True)

    training = replace(COUNTING, reference=reference)
    assert judge(training, lambda m, w: step(m, w, zero=False)).outcome == PASSED


def test_gradients_of_zeros_are_none():
    def answer(model, weights):
        weights[0].grad = torch.zeros_like(weights[0])
        return count(model, weights)

    assert judge(COUNTING, answer).outcome == PASSED
