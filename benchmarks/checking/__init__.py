"""What `benchmarks.gpu_check` measures, one file a subject, and how it is run: in slices, each part in a process of its own."""
