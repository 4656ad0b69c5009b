"""What a recipe will take, before any GPU is rented: facts of the recipe, throughput with its origin, and both as text. No torch but for counting."""
