#!/bin/sh
# Find a Python that really runs (a shim on the PATH may not) and hand over to scripts/setup.py.
cd "$(dirname "$0")/.." || exit 1
for python in python3.13 python3.12 python3.11 python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        exec "$python" scripts/setup.py "$@"
    fi
done
echo "setup: no Python 3.11 or newer runs here: install one (Debian, Ubuntu: apt-get install python3 python3-venv; macOS: brew install python@3.12)" >&2
exit 1
