"""SGLang behind the engine protocol."""
