"""A vLLM engine in another interpreter, driven by lines of JSON."""
