"""What several commands put together from their configuration."""
