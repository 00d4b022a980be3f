"""The room that a plan leaves, since a prediction for a card is an estimate."""

# As a share of what is needed: at least as much as published runs reserved more than was predicted
# (published.json; a test compares). Several cards: FSDP gathers and frees whole layers, and what
# its allocator reserves is predicted less well.
MARGIN = 0.03
MARGIN_OF_SEVERAL_CARDS = 0.045


def check_margin(margin: float | None, target: str, cards: int) -> float:
    """``margin``, or the default one for ``None``.

    Raises ``ValueError`` for anything but a share from 0 to below 1.
    """
    if margin is None:
        if target == "cpu":  # bytes of live tensors are predicted exactly
            return 0.0
        return MARGIN if cards == 1 else MARGIN_OF_SEVERAL_CARDS
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not 0 <= margin < 1:
        raise ValueError(
            f"margin={margin!r}: give the share of the needed bytes that has to stay free, from 0 "
            "to below 1, such as 0.03"
        )
    return float(margin)
