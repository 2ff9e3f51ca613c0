"""The broker over a Redis server: its client, errors and outages, and the server that a run starts itself."""
