"""What every station speaks of: types, chance, sampling, losses."""
