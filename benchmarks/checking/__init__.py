"""The parts of `benchmarks.gpu_check`, one file a subject, run in slices, each part in a process of its own."""
