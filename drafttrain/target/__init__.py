"""The frozen target and its features."""
