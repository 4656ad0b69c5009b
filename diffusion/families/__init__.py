"""Model families: everything peculiar to one, and what all of them are asked."""
