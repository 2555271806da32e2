"""Drafters of others in, exports to serving engines and the Hub out."""
