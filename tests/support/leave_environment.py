"""Write what `accelerate launch` sets in this rank's environment into the folder that `--config` names, and end.

Imports nothing that takes seconds, except to build DeepSpeed's extension where it is not built yet.
"""

import json
import os
import sys
from pathlib import Path

LAUNCHERS = ("ACCELERATE_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FSDP_")


def main() -> None:
    """Leave `RANK.json`."""
    folder = Path(sys.argv[sys.argv.index("--config") + 1])
    if "ACCELERATE_USE_DEEPSPEED" in os.environ and not list(
        Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/deepspeed_shm_comm.so")
    ):
        import deepspeed

        deepspeed.init_distributed("gloo")  # the build would be slow under strace
    kept = {key: value for key, value in os.environ.items() if key.startswith(LAUNCHERS)}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
