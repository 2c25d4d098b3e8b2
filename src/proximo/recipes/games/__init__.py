"""Small games and tools as environments, each with the exact score of its best play and of random play.

A game is a class of rules (`rules.py`): the same rules are played turn by turn and enumerated.
"""
