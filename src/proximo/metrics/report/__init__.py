"""The page report.html of a run, and tables and comparisons of runs. Read `page.py` first, then `views.py`."""
