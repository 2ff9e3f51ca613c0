"""Lets agents lead episodes through addresses of OpenAI's form."""
