"""The sub-commands of `paceline`: one module each, in packages by purpose."""
