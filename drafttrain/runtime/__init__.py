"""The machine and its files: ranks, hardware, disk, locks, run folders, trackers, the terminal."""
