"""Locates tensor parts on ranks, plans and carries out weight pushes, and proves that they arrived."""
