"""The work of the commands after training: generate, chat, evaluate, export, report, serve rewards.

`cli/` parses their options; `library/` offers them as Python objects; `pipeline/` runs several stages.
"""
