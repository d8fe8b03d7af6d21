"""`python -m gradleak`."""

import sys

from gradleak.cli import main

sys.exit(main())
