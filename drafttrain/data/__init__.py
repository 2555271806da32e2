"""Conversations, their tokens and loss masks, and the batches of each optimizer step."""
