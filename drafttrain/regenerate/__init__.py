"""Conversations in the target's own words: answers to prompts that there are, or all of it."""

from drafttrain.regenerate.config import RegenerateConfig
from drafttrain.regenerate.selfgen import selfgen
from drafttrain.regenerate.work import regenerate

__all__ = ["RegenerateConfig", "regenerate", "selfgen"]
