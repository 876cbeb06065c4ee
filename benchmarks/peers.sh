#!/bin/sh
# Make the environment of the peers: sh benchmarks/peers.sh FOLDER. One that cannot be installed is left out, and said.
set -e
folder=$1
here=$(dirname "$0")
${PYTHON:-python3} -m venv "$folder"
# torch goes first and pinned: unpinned, some peer would choose a build.
pinned=$(grep -E '^torch(vision)?==' "$here/../constraints.txt")
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check $pinned
grep -v '^#' "$here/peers.txt" | while read -r peer; do
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check $pinned "$peer" || echo "not installed: $peer"
done
# It has our import name, so it goes where nobody finds it by that.
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --target "$folder/torchhook-0.2.7" torchhook==0.2.7 || echo "not installed: TorchHook 0.2.7"
