"""The learner's ranks: process group, command loop, weight publishing."""
