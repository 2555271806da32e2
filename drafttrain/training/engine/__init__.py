"""Backward, step, clip and save behind one face: plain torch, or DeepSpeed's ZeRO."""
