"""Conversations, the tokens and loss masks made of them, and the batches of each optimizer step."""
