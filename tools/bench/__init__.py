"""Benchmarks against peers: everything measured in one run, in interleaved rounds, reported as ratios."""
