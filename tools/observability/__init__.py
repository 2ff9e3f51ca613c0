"""Alert rules, dashboards and tables that tools/generate_observability.py writes."""
