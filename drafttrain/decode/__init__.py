"""Propose, verify, commit: speculative decoding, and the plain loop it is measured against."""
