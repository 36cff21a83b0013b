"""Fitting of codebooks, in NumPy and float64 where it matters; all of it deterministic."""
