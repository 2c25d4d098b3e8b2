"""The scripts of benchmarks/ are imported as they import each other: by their bare names."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "peers")]
