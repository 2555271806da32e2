"""Tensor operations, each with a plain twin that tests compare it to."""
