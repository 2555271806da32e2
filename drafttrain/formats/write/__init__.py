"""Drafters out to serving engines and the Hub; every export loads its own output back."""
