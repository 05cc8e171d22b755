"""Converts weights between other codebases and vitline, with a report of every entry. Unexplained entries are errors."""
