"""Transports weights: process groups, their rendezvous, and copies to and from staging."""
