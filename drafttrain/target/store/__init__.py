"""Features on disk: what a store holds, how it is written, and how training reads it."""
