"""Runs untrusted programs (code that a model wrote) without network, in a separate root, with limits."""
