"""Memory of the fleet: PostgreSQL, its schema, and statements that a machine without a lease cannot pass."""
