"""Backward, step, clip and save behind one interface: plain torch, or DeepSpeed's ZeRO."""
