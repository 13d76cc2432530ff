"""Run a module as a rank of a job and write its exit code: `torchrun ... -m tests.distributed.exit_code DIR MODULE`.

`torchrun` does not tell which code a rank ended with after a signal.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(directory: str, *module: str) -> int:
    # torchrun signals the whole process group: the child has the signal already, this process only waits.
    signal.signal(signal.SIGTERM, lambda *_: None)
    code = subprocess.Popen([sys.executable, "-m", *module]).wait()
    (Path(directory) / f"{os.environ['RANK']}.code").write_text(str(code))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
