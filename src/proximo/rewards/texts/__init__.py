"""Verifiers of the form of a text: pattern, length, repetition, JSON, think-answer tags. One file each."""
