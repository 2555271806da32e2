"""Conversations written by the target: its answers to given prompts, or both sides."""
