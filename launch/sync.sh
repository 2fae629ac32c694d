#!/bin/sh
# launch/sync.sh HOST:RUN_FOLDER [RSYNC OPTIONS]    copy a run into runs/; when repeated, copy only what has changed
# HOST:FOLDER/ with a trailing slash copies all runs in that folder. Nothing is deleted, and links are not followed.
# Checkpoints are left out: --include='checkpoint-*' copies all of them, --include=checkpoint-40 only that one.
set -eu
[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
type rsync >/dev/null 2>&1 || { echo "error: there is no rsync here: install it (apt install rsync)" >&2; exit 2; }
source=$1
shift
mkdir -p runs
exec rsync --recursive --times --compress --verbose "$@" \
  --exclude='training_state/checkpoint-*' --exclude='*.tmp' --exclude='.*' "$source" runs/
