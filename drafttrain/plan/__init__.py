"""Memory, time, disk and money of a run before it, and what its drafter will be worth."""
