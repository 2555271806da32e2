"""Conversations in the target's own words: answers to prompts that there are, or all of it."""
