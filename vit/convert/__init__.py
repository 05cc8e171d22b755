"""Weights of other codebases <-> ours, with an exact report; anything that cannot be explained is an error."""
