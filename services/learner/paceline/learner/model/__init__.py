"""The networks: loading, sharding, attention."""
