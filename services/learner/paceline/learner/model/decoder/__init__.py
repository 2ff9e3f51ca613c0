"""How decoder layers compute: attention, experts, what is compiled and what is kept."""
