"""The sections of recipes, without torch. `loader.py` reads a recipe; `schema/` has what all sections share."""
