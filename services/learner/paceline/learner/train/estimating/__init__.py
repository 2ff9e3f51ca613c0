"""Estimates advantages from scores, and shapes the batch before and after."""
