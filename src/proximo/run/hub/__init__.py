"""Uploads trained models to the Hugging Face Hub: `pushes.py` decides when, `upload.py` does it in another process."""
