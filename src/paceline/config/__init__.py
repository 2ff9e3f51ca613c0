"""Configuration: frozen models, YAML loading, dotted overrides; imports no torch."""
