"""Tensor code with a plain twin that tests compare it to."""
