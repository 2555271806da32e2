"""vLLM as a witness: the same prompts and drafter in a real engine, to compare with our loop."""
