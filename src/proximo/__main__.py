"""`python -m proximo`, where the command is not on the path."""

import sys

from proximo.cli import main

sys.exit(main())
