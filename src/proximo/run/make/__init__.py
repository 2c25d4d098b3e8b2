"""Makes the parts of a task from a recipe: models and tokenizers (`models.py`), data, rewards, engines, shards."""
