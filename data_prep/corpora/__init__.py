"""Readers of sources of labelled images, one small file each, behind the interface of `raw.py`."""
