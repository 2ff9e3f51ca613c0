"""Facts about models by `model_type`, and sizes from config.json. Imports no torch."""
