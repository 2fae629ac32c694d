#!/bin/sh
# launch/sync.sh HOST:RUN_FOLDER [OPTIONS OF RSYNC]    copy a run into runs/ here; again: only what changed
# HOST:FOLDER/, with a slash at its end, copies all runs in a folder. Nothing is deleted, and no link is followed.
# Checkpoints stay behind: --include='checkpoint-*' copies all of them, --include=checkpoint-40 that one.
set -eu
[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
type rsync >/dev/null 2>&1 || { echo "error: there is no rsync here: install it (apt install rsync)" >&2; exit 2; }
source=$1
shift
mkdir -p runs
exec rsync --recursive --times --compress --verbose "$@" \
  --exclude='training_state/checkpoint-*' --exclude='*.tmp' --exclude='.*' "$source" runs/
