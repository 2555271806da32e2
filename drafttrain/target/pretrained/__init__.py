"""Loading Transformers models and tokenizers safely: from a directory, the Hub, or at random."""
