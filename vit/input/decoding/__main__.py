"""Starts an input process. What it receives must not be of this module's types, whose name is `__main__` here."""

from vitline.vit.input.decoding.process import main

main()
