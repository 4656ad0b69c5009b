"""The cost of training in hours and dollars, before, during and after. No torch: a laptop can plan a run."""
