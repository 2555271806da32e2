"""drafttrain: train, measure and serve the drafters of speculative decoding."""

__version__ = "0.4.0"
