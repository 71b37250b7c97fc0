"""Benchmarks. Contenders run side by side in one run; the figures to quote are the ratios."""
