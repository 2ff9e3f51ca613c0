"""Folders by path or URL: operations on them, the folders of a run, local copies of remote folders."""
