"""One rank of `test_launch.py`, run as a script: launched_rank.py FOLDER CASE. Needs no torch, so it starts at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path, case: str) -> None:
    """Note the process, and end as the case says; rank 1 is the one that fails."""
    rank = int(os.environ["RANK"])
    if case == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    print(f"out of rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
    print(f"err of rank {rank}", file=sys.stderr, flush=True)
    while len(list(folder.glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == 1 and case == "fails":
        sys.exit(3)
    if rank == 1 and case in ("killed", "stubborn"):
        os.kill(os.getpid(), signal.SIGKILL)
    if case != "ends":
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            (folder / f"{rank}.interrupted").touch()
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
