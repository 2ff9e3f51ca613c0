"""What tools/generate_observability.py writes: alert rules, dashboards, tables of the documentation."""
