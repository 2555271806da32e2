"""Reading drafters that others trained; writing exports for serving engines and the Hub."""
