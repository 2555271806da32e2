"""vLLM at work for us: another interpreter, told what to do line by line."""
