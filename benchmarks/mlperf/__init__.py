"""MLPerf Training's Stable Diffusion benchmark: its recipe, its data, its log lines and its verdict on a set of runs (benchmarks/mlperf.md)."""
