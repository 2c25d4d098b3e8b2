"""From files to token ids: `readers/` gives rows, `formats/` prompts and responses, `templates/` texts, then
`tokenise.py` token ids.

Start with the loader of a trainer: `prompts.py` (PPO), `examples.py` (SFT), `preferences.py` (reward model, DPO).
"""
