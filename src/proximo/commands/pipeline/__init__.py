"""The pipeline: `recipe.py` holds one recipe per stage, `run.py` runs the stages in order."""
