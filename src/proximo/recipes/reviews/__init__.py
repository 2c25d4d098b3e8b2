"""The embedded example: made-up product reviews (`review_rows.py`) and their exact score (`gold.py`)."""
