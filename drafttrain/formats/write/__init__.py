"""Export drafters to serving engines and the Hub; every export loads its own output back."""
