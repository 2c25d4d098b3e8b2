"""The base class of sections, the YAML reader with positions, overrides, and the messages of mistakes."""
