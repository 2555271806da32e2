"""vLLM as a second witness: the same prompts and drafter through a real engine, beside our loop."""
