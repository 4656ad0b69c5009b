"""What the fleet remembers: PostgreSQL, its schema, and statements that a machine without a lease cannot pass."""
