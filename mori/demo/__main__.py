"""Runs the example, prints the times and the verdict. Each of the 8 rank processes imports this module first."""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from mori import env

# Importing torch makes hundreds of thousands of objects that all stay. With the cycle collector off it takes a quarter
# less time, and most of this program's time is nine imports of torch; mori.demo.example switches it on again.
gc.disable()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mori.demo", description=__doc__)
    parser.add_argument("--flip-bit", action="store_true", help="flip one bit before the check, to see it fail")
    arguments = parser.parse_args()

    env.put("MORI_TARGET", "host")  # this is the CPU text, whatever else the machine has
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # 8 ranks share the cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all of them on this machine, whatever its name resolves to
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        os.environ["EP_DEMO_REPORT"] = str(report)
        if arguments.flip_bit:
            os.environ["EP_DEMO_FLIP_BIT"] = "1"
        return run(report)


def run(report: Path) -> int:
    from torch.multiprocessing.spawn import ProcessException

    from mori.demo import adapt, example, measure

    try:
        example.run(free_port())
    except ProcessException as problem:
        message = str(problem).strip()
        print(message, file=sys.stderr)
        reason = message.splitlines()[-1].removeprefix("mori.demo.check.Mismatch: ")
        print(f"demo: FAILED: {reason}", flush=True)
        return 1
    ranks = json.loads(report.read_text())
    print(measure.table(ranks))
    rows = sum(rank["rows_received"] for rank in ranks)
    print(f"demo: ok, {adapt.WORLD_SIZE} ranks, {rows} rows, every bit as expected")
    return 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
