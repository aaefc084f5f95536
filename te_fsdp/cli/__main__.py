"""Entry point of ``python -m te_fsdp.cli``."""

import sys

from te_fsdp.cli import main

sys.exit(main())
