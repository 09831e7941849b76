"""``python -m tokenspeed_tui``."""

import sys

from tokenspeed_tui import main

sys.exit(main())
