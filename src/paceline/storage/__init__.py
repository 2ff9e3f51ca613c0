"""Folders by path or URL: operations on both, the places of a run, local copies of remote folders."""
