"""Measure the engine: `deltaic bench`."""
