"""Lets `python -m ranksearch` do what `ranksearch` does."""

from ranksearch.cli import main

main()
