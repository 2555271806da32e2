"""One file per drafter family; `base` holds what they share and the drawing of the off-by-ones."""
