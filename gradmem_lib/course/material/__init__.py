"""Models, texts, shapes and closed forms that lessons show; no exercise and no claim."""
