"""What lesson 01 says of the errors that it shows."""

import pytest

from gradmem_lib import BudgetExceeded, MemoryTracker, diagnose
from gradmem_lib.course import train_budget, train_setting


def test_the_error_of_the_usual_loop_names_two_causes_and_the_second_is_free_to_mend():
    model, optimizer, batches = train_setting()
    with (
        pytest.raises(BudgetExceeded) as raised,
        MemoryTracker(model, optimizer, budget=train_budget()),
    ):
        for ids in batches:
            output = model(input_ids=ids, labels=ids)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    logits, kept = diagnose(raised.value).causes
    assert logits.name == "The logits are the largest part"
    assert kept.name == "Tensors of the step before are still there" and "output[" in kept.held
    assert str(raised.value).count("Remedy: ") == 2
    model, optimizer, batches = train_setting()
    with MemoryTracker(model, optimizer, budget=train_budget()):
        for ids in batches:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
