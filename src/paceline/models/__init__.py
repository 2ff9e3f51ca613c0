"""Says what kinds of models are like: facts by `model_type`, sizes from config.json. No torch here."""
