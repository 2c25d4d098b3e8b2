"""The embedded example: generated product reviews (`review_rows.py`) and their exact score (`gold.py`)."""
