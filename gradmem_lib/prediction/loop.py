"""The loop around the model: when gradients are freed, what a variable keeps, what is clipped.

The command line reads the fields and their defaults without torch.
"""

from dataclasses import dataclass

from ..names import LOOP_KEEPS, ZERO_GRAD, check_choice


@dataclass(frozen=True)
class Loop:
    """How a training loop is written, as far as memory is concerned. The default is ``Recipe``'s
    own step.

    Attributes:
        zero_grad: where the loop calls ``optimizer.zero_grad()``: ``"after step"``,
            ``"before forward"`` (gradients stay between steps), or ``"before backward"`` (they stay
            during forward as well, a whole copy more).
        keeps: what a variable of the loop holds until the next step assigns it again: ``None``,
            ``"loss"`` (as in ``loss = model(**batch).loss``: 4 bytes), or ``"outputs"`` (as in
            ``outputs = model(**batch)``: logits, and keys and values if the cache is on).
        clips: the norm of the gradients is clipped before the optimizer's step.
    """

    zero_grad: str = "after step"
    keeps: str | None = None
    clips: bool = False

    def __post_init__(self) -> None:
        check_choice("zero_grad", self.zero_grad, ZERO_GRAD)
        check_choice("keeps", self.keeps, (None, *LOOP_KEEPS))
        if not isinstance(self.clips, bool):
            raise ValueError(f"clips={self.clips!r}: it is a switch, give True or False")
