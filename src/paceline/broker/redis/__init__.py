"""The broker over a Redis server: its client, errors and outages, and a server of the run's own."""
