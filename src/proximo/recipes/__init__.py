"""The recipes and example functions that are shipped."""
