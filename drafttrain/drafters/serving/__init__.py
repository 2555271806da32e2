"""Files of drafters: how a family's are recognised, read, written and served."""
