"""Memory, time, disk and money of a run before it starts, and what its drafter will be worth."""
