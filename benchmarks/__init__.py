"""Benchmarks against what people do today: ratios of one run, never asserted in tests."""
