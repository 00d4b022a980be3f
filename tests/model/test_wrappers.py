"""What is around a model: processes, and PEFT."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from gradmem_lib import plan
from gradmem_lib.course.material.models import tiny_llama
from gradmem_lib.model.wrappers import inside_peft, inside_wrapper, without_wrappers


def test_each_wrapper_is_taken_off_and_no_part_that_is_only_called_so():
    model = tiny_llama()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped = nn.DataParallel(adapted)
    assert inside_wrapper(wrapped) is adapted and inside_peft(adapted) is model
    assert without_wrappers(wrapped) is model and inside_peft(wrapped) is wrapped
    own = nn.Module()
    own.module = model
    assert without_wrappers(own) is own


def test_a_plan_of_a_wrapped_model_says_that_it_has_no_config():
    with pytest.raises(ValueError, match="DataParallel has no config, so its inputs are not known"):
        plan(nn.DataParallel(tiny_llama()), card="1 GiB", seq_len=8, global_batch=1)
