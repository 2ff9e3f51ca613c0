"""The process group of a push, its rendezvous, and the copies at its ends."""
