"""Locates tensor parts on ranks, plans and carries out weight pushes, and checks that they arrived."""
