"""Programs of others, run without network, in a root of their own, with limits: code that a model wrote."""
