"""Drafters that others trained: recognised, checked against the target, and loaded."""
