"""What all stations share: types, chance, sampling, losses."""
