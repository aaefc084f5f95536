"""``python -m te_fsdp.cli``: the command ``te-fsdp`` without its script."""

import sys

from te_fsdp.cli import main

sys.exit(main())
