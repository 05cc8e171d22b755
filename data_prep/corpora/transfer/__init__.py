"""The data sets that the ViT paper transfers to besides VTAB."""
