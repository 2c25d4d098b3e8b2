"""Sources of rewards: functions, models, verifiers, services. Read `source.py` (protocols), then `function.py`."""
