"""Five sessions of a model, one after the other: prints the memory of the process after each was closed, in bytes.

python -m tests.engine.five_boots MODEL
"""

from __future__ import annotations

import gc
import json
import sys
import time

import psutil

import explorer

if __name__ == "__main__":
    after = []
    for _ in range(5):
        with explorer.boot(sys.argv[1], max_model_len=512) as session:
            session.compare([1, 5, 9, 14], {"blocks.0.hook_out": {"op": "suppress"}}, capture="all")
        del session
        time.sleep(0.5)  # the worker thread has done its last job and ends now
        gc.collect()
        after.append(psutil.Process().memory_info().rss)
    print(json.dumps(after))
