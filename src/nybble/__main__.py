"""`python -m nybble` is `nybble`."""

import sys

from nybble.cli import main

sys.exit(main())
